"""Import of the checkpoints that the authors published."""

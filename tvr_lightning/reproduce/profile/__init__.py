"""What a method costs: measured on random media, kept on a card, set beside the print by the report."""

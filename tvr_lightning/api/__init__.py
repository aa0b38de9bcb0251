"""Trained methods outside training: in Python, on the Hugging Face Hub, in MTEB, and as ONNX."""

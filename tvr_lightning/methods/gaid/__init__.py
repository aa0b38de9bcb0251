"""GAID: deviations from the paper in `method.py`, equations in `model.py`, options in `options.py`."""

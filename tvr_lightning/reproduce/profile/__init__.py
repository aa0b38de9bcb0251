"""Costs of a method: measured on random media and written to a card, which the report compares with papers."""

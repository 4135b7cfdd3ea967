"""Closed forms for the sharpness of attention, and how well trained heads follow them."""

"""Laws of sharpness, and how trained heads follow them."""

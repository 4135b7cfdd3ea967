"""What tasks have in common: one head over items, or a small transformer over tokens."""

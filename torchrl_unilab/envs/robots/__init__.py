"""Tasks on robots of the user's own: named terms, sensor noise, delays, and an example."""

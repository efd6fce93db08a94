"""Tasks on robots of the user's own: named terms, senses and nerves, an example."""

"""Photos and masks as pixels: decoded, compared, and seen in their views."""

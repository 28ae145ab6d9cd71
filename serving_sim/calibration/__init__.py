"""Step times measured on a device, and the profile fitted to them."""

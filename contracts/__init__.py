"""The nouns everyone shares. Standard library and numpy only; imports nothing of this project."""

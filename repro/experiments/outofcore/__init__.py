"""Out-of-core training (Hayakawa and Narihira)."""

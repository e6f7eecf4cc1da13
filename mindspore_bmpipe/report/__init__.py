"""Plans and costs for people and for other programs."""

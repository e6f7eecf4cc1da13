"""Costs of units: from graphs to expressions, and from expressions to the numbers a planner takes."""

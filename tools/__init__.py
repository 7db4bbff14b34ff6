"""What only the maintainers use: recipes, pages filled from results, publishing; no part of the package."""

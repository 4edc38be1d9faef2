"""The mlx target."""

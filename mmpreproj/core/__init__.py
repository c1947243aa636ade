"""The mathematics: position-agnostic modules and rectified flow, on torch alone."""

"""Backends: where K and V bytes live and graphs are computed."""

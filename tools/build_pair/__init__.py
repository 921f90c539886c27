"""Builds the small target and drafts that ship with specgen, from packages of public registries."""

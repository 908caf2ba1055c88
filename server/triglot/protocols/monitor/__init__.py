"""Monitoring: metrics, and a page for people."""

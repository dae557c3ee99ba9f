"""Joins the processes of a run, checks that they match, and passes messages between them."""

"""Conversations: chat templates, and which of their tokens are learned."""

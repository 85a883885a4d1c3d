"""Agents: programs of their own that play through OpenAI's API. Each episode has its own process (`env.name=agent`)."""

"""Agents: programs of their own that play through OpenAI's API. Each is started anew for every episode (`env.name=agent`)."""

"""zm-port: makes vLLM's rollout and the learner compute the same bits."""

__version__ = "0.1.0"

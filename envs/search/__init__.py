"""Questions that are answered by searching passages: a generated world, or questions and passages of your own."""

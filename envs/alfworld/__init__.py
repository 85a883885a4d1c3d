"""ALFWorld's household text games (ALFRED scenes) as a pure-Python engine; reads the official `game.tw-pddl` files."""

from hgpo_jax.envs.alfworld.game import Game, GameData, load_game

__all__ = ["Game", "GameData", "load_game"]

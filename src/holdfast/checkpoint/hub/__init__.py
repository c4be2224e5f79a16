"""Hugging Face repositories: safetensors files into a tree on any mesh by a mapping of names, and back."""

from holdfast.checkpoint.hub.exporting import export_hub, save_hub
from holdfast.checkpoint.hub.loading import load_hub
from holdfast.checkpoint.hub.mapping import NameMap, Rule
from holdfast.checkpoint.hub.matching import Matched
from holdfast.checkpoint.hub.repository import Repository, read_json

__all__ = ["Matched", "NameMap", "Repository", "Rule", "export_hub", "load_hub", "read_json", "save_hub"]

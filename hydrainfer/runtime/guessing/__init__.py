"""Guesses of the next tokens that the device makes itself, after a language batch was sampled: by the model's MTP
layer, by an 8-bit copy of the model, or by a smaller model."""

from hydrainfer.runtime.guessing.beside import DraftModel
from hydrainfer.runtime.guessing.copied import CopyGuesser
from hydrainfer.runtime.guessing.mtp import MtpGuesser
from hydrainfer.runtime.guessing.places import Guesser, Passed

__all__ = ["CopyGuesser", "DraftModel", "Guesser", "MtpGuesser", "Passed"]

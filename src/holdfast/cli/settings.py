"""Commands that take SETTING=VALUE."""

from __future__ import annotations

import dataclasses
from typing import final

import click

from holdfast.errors import UsageError


@final
class SettingsCommand(click.Command):
    """Says how a setting is given to whoever writes it like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from holdfast.train.config import TrainConfig

            option = error.option_name
            setting = option.lstrip("-").replace("-", "_")
            if setting.partition(".")[0] not in {field.name for field in dataclasses.fields(TrainConfig)}:
                raise
            raise UsageError(
                f"there is no option {option}", hint=f"a setting has no dashes: {setting}=VALUE"
            ) from error

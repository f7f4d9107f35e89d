"""The base of every typed result that is written to a file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen, refuses unknown fields and numbers that JSON cannot hold (NaN, infinity).

    Every field is written, so that in the exported schema every field is required.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
    )

"""What training has of each stream: its data, its lanes, and where they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from txl_audio import parallel
from txl_audio.config import Config
from txl_audio.data.disturb import DisturbConfig
from txl_audio.data.stream import Documents, TokenStream
from txl_audio.evaluate import Totals
from txl_audio.model.memory import Memory
from txl_audio.model.sequence import SequenceModel, SequenceState
from txl_audio.tokens import ConfigError


class StreamTrainConfig(Config):
    """What one of several streams has of its own; None takes the training's."""

    weight: float = Field(default=1.0, gt=0)
    lanes: int | None = Field(default=None, ge=1)
    segment_len: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class StreamData:
    """The data of one stream.

    data_id: identity of the training documents; a resume with another is refused.
    separator: symbol that ends a sentence, where sentences are shuffled; see TokenStream.
    name_of: what to call a training document, by its index.
    """

    train: Documents
    valid: Documents
    data_id: str = ""
    separator: int | None = None
    name_of: Callable[[int], str] = str


class StreamTraining:
    """Where the training of one stream stands: its lanes, their memory, its totals since the last record.

    `lanes_setting` is the key that lanes are set by. Raises ConfigError where they cannot be shared, and for
    another number of weights than of codebooks.
    """

    def __init__(
        self,
        model: SequenceModel,
        config: StreamTrainConfig,
        data: StreamData,
        *,
        seed: int,
        lanes_setting: str,
        disturb: DisturbConfig | None = None,
        codebook_weights: Sequence[float] | None = None,
    ) -> None:
        assert config.lanes is not None and config.segment_len is not None
        self.own = parallel.own_lanes(config.lanes, setting=lanes_setting)
        self.model, self.config, self.data = model, config, data
        self.batches = TokenStream(
            data.train,
            model.spec,
            lanes=config.lanes,
            segment_len=config.segment_len,
            seed=seed,
            epochs=None,
            separator=data.separator,
            disturb=disturb if model.spec.modality == "waveform" else None,
        )
        self.state = model.initial_state(self.own.stop - self.own.start)
        self.weights = None if codebook_weights is None else self._weights(codebook_weights)
        self.totals = Totals(0.0, 0)
        self.steps = 0

    def _weights(self, given: Sequence[float]) -> Tensor | None:
        """[K] with mean 1; None where a frame is no codes."""
        spec = self.model.spec
        if spec.modality != "codes":
            return None
        if len(given) != spec.symbols_per_frame:
            raise ConfigError(
                f"train.codebook_weights has {len(given)} weights, expected {spec.symbols_per_frame}, one "
                f"for each codebook of {spec.name}"
            )
        weights = torch.tensor(given, device=self.state.recent.device)
        return weights / weights.mean()

    @property
    def memory(self) -> Memory:
        memory = self.state.memory
        assert isinstance(memory, Memory)  # never a projected one, which has no gradient
        return memory

    def tensors(self) -> dict[str, Tensor]:
        """Memory of the lanes of all ranks; every rank has to ask."""
        own = {f"memory.{i}": hidden for i, hidden in enumerate(self.memory.hidden)}
        own |= {"valid": self.memory.valid, "recent": self.state.recent}
        if self.state.stage is not None:
            own["stage"] = self.state.stage.to(self.memory.valid.device)  # where ranks can exchange it
        return {name: parallel.gathered(value) for name, value in own.items()}

    def values(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json"),
            "data_id": self.data.data_id,
            "batches": self.batches.state_dict(),
            "totals": asdict(self.totals),
            "steps": self.steps,
        }

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        device = self.state.recent.device
        own = {name: value[self.own] for name, value in tensors.items()}
        stage = own.pop("stage", None)  # stays on the CPU
        own = {name: value.to(device) for name, value in own.items()}
        memory = Memory(tuple(own[f"memory.{i}"] for i in range(self.memory.n_layer)), own["valid"])
        self.state = SequenceState(memory, own["recent"], stage)
        self.batches.load_state_dict(values["batches"])
        self.totals, self.steps = Totals(**values["totals"]), values["steps"]

"""What two engines tell one another before anything moves, and what of it must be equal."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ConfigError, ModelConfig
from glm_dcp_jax.model.converted import ConvertedCheckpoint
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.transfer.pieces import Geometry

PROTOCOL = 1
"""Raised with every change of what is said or of what bytes mean."""
_SAMPLE_BYTES = 64
_SAMPLED_TENSORS = 4096
_MOST_RANKS, _MOST = 4096, 2**31 - 1


@dataclass(frozen=True)
class Fingerprint:
    """An engine, for the engine it talks to.

    Equal on both sides: protocol, connector, model (of config.json and of samples of the weights; "" where it is not to
    be checked), record (the bytes of a record and an index key), layers, full_layers. mtp: whether the MTP layer's
    caches are written; a consumer that needs them needs a producer that has them.

    Free on both sides: tp, dcp, block_size, interleave, index_shards. piece_tokens: tokens that it takes or gives at
    once.
    """

    protocol: int
    connector: str
    model: str
    record: str
    layers: int
    full_layers: int
    mtp: bool
    tp: int
    dcp: int
    block_size: int
    interleave: int
    index_shards: int
    piece_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type:
                raise ConfigError(f"fingerprint: {field.name} is {value!r}, but must be {field.type}")
        numbers = [getattr(self, field.name) for field in fields(self) if field.type is int]
        if not 1 <= self.tp <= _MOST_RANKS or max(numbers) > _MOST:  # nobody's arrays get larger than that
            raise ConfigError(f"fingerprint: more than {_MOST_RANKS} ranks, or a number above {_MOST}")
        if self.tp < 1 or self.dcp < 1 or self.tp % self.dcp or self.piece_tokens < 1:
            raise ConfigError(
                f"fingerprint: tp {self.tp}, dcp {self.dcp}, piece_tokens {self.piece_tokens} cannot be"
            )

    @property
    def digest(self) -> str:
        """Of what must be equal: the first thing that is compared, before anything else is read."""
        equal = {name: value for name, value in asdict(self).items() if name in _EQUAL}
        return sha256(json.dumps(equal, sort_keys=True).encode()).hexdigest()

    @property
    def geometry(self) -> Geometry:
        """How it lays out its caches. Raises ConfigError for a layout that there cannot be."""
        return Geometry(self.tp, Layout(self.block_size, self.dcp, self.interleave, self.index_shards))

    @staticmethod
    def from_object(given: object) -> "Fingerprint":
        """As the other side sent it. Raises ConfigError for what is none."""
        names = [field.name for field in fields(Fingerprint)]
        if not isinstance(given, Mapping) or sorted(given) != sorted(names):
            raise ConfigError(f"a fingerprint has {', '.join(names)}, but this is {given!r:.200}")
        return Fingerprint(**given)

    def as_object(self) -> dict[str, Any]:
        """For the other side."""
        return asdict(self)


_EQUAL = ("protocol", "connector", "model", "record", "layers", "full_layers")
_SAID = {
    "protocol": "speaks version {} of the protocol",
    "connector": "uses the connector {}",
    "model": "serves a model with the digest {:.16}",
    "record": "keeps records of the format {}",
    "layers": "has {} layers",
    "full_layers": "has {} Full layers",
}


def check_alike(producer: Fingerprint, consumer: Fingerprint) -> None:
    """Raise ConfigError, with all that differs, if the consumer could not use what the producer has."""
    wrong = [
        f"the producer {said.format(getattr(producer, name))}, the consumer {said.format(getattr(consumer, name))}"
        for name, said in _SAID.items()
        if getattr(producer, name) != getattr(consumer, name)
    ]
    if consumer.mtp and not producer.mtp:
        wrong.append(
            "the consumer drafts with the MTP layer, whose caches the producer does not write; start the producer with "
            "--speculative-config too"
        )
    if wrong:
        raise ConfigError("these two engines do not fit together: " + "; ".join(wrong))


def record_id(record: RecordFormat, scales: tuple[float, ...] | None) -> str:
    """All that decides what a record's bytes mean. scales: the outer scales of nvfp4_ds_mla."""
    kinds = ",".join(f"{field.name}:{field.kind}x{field.count}@{field.offset}" for field in record.fields)
    name = f"{record.name} {kinds} index:{record.index.kind}x{record.index.width}"
    return name if scales is None else f"{name} scales:{sha256(repr(scales).encode()).hexdigest()[:16]}"


def model_id(model: ModelConfig, checkpoint: Checkpoint | ConvertedCheckpoint) -> str:
    """A digest of config.json's fields and of samples of the weights; a converted checkpoint's is its original's."""
    weights = checkpoint.weights_id if isinstance(checkpoint, ConvertedCheckpoint) else weights_id(checkpoint)
    return sha256(f"{model!r} {weights}".encode()).hexdigest()


def weights_id(checkpoint: Checkpoint) -> str:
    """A digest of samples of the weights.

    Some bytes from the middle of each tensor, or of 4,096 of them: another training run changes nearly all of them.
    """
    digest = sha256()
    names = checkpoint.names()
    for name in names[:: max(1, len(names) // _SAMPLED_TENSORS)]:
        info = checkpoint.info(name)
        digest.update(f"{name} {info.dtype} {info.shape}".encode())
        with info.file.open("rb") as file:
            file.seek(info.offset + max(0, (info.nbytes - _SAMPLE_BYTES) // 2))
            digest.update(file.read(min(_SAMPLE_BYTES, info.nbytes)))
    return digest.hexdigest()

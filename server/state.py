"""What the HTTP surface knows of the server behind it: the model, the engine, and whether requests are taken."""

import hashlib
import random
import time
from dataclasses import dataclass, field

from protocol.messages import VerifierReady
from server.build import Weights, package_version
from server.config import ServeConfig
from server.engine import Engine
from server.errors import ApiError, unavailable, unknown_model
from server.keys import ApiKeys
from server.metrics import Metrics, RejectionLabel
from server.parsing import UnknownFields
from server.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """The target as clients see it: the names they may use (the first is the main one) and its tokenizer."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    root: str
    weights: tuple[Weights, ...] = ()


@dataclass(frozen=True)
class Serving:
    """Everything a request needs, once the model is loaded."""

    model: ServedModel
    engine: Engine
    info: VerifierReady
    config: ServeConfig

    @property
    def max_model_len(self) -> int:
        """Most tokens a sequence may have."""
        return self.info.max_model_len

    @property
    def fingerprint(self) -> str:
        """Changes with everything that a seed's text depends on: weights, number format, version of the engine."""
        parts = [f"{item.role}:{item.name}:{item.revision}" for item in self.model.weights]
        text = "\n".join([*parts, self.info.dtype, package_version()])
        return "fp_" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @property
    def num_token_ids(self) -> int:
        """Ids below this one are usable: the target has a row for them and the tokenizer a spelling."""
        return min(self.info.vocab_size, self.model.tokenizer.vocab_size)

    def check_name(self, name: str | None) -> str:
        """The name to answer with; raises 404 for a model that is not served."""
        if name is None:
            return self.model.names[0]
        if name not in self.model.names:
            raise unknown_model(name[:200])
        return name


@dataclass
class ServerState:
    """The state one application serves from; filled in while the model loads."""

    config: ServeConfig
    metrics: Metrics
    model: ServedModel | None = None
    engine: Engine | None = None
    is_ready: bool = False
    is_draining: bool = False
    keys: ApiKeys = field(default_factory=ApiKeys)
    created: int = field(default_factory=lambda: int(time.time()))
    unknown_fields: UnknownFields = field(init=False)
    seeds: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.unknown_fields = UnknownFields(self.config.strict_params)
        self.seeds = random.SystemRandom() if self.config.seed is None else random.Random(self.config.seed)

    def serving(self) -> Serving:
        """What is needed to answer a request; raises 503 while loading, draining or dead."""
        if self.is_draining:
            raise self._refusal("draining", "The server is shutting down.", closing=True)
        engine, model = self.engine, self.model
        if engine is not None and (engine.failure is not None or engine.is_stuck):
            raise self._refusal("unavailable", f"The engine has stopped: {engine.failure or 'no progress'}.")
        if engine is None or model is None or engine.info is None or not self.is_ready:
            raise self._refusal("loading", "The model is loading.")
        return Serving(model, engine, engine.info, self.config)

    def _refusal(self, reason: RejectionLabel, message: str, *, closing: bool = False) -> ApiError:
        self.metrics.rejections.labels(reason).inc()
        return unavailable(message, closing=closing)

    @property
    def health(self) -> str:
        """`ok`, `degraded` (no drafter), `loading`, or why nothing can be generated."""
        engine = self.engine
        if engine is not None and (engine.failure is not None or engine.is_stuck):
            return engine.failure or "the verifier makes no progress"
        if engine is None or not self.is_ready:
            return "loading"
        wants_drafter = self.config.method != "ar"
        return "degraded" if wants_drafter and not self.metrics.is_drafter_up else "ok"

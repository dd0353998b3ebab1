"""vLLM's KV connector: prefixes that any engine on this node has computed are loaded, not prefilled.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvtierConnector",
      "kv_connector_module_path": "kvtier.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"kvtier.endpoint": "unix:///run/kvtier/kvtier.sock"}}'

Loads are asynchronous: a request waits for its pages while others are computed. Saves are copied out within
the step that fills a block, so that preemption and reuse of blocks cannot touch them, and committed on another
thread. A node that is absent, slow or killed is a miss; a page that cannot be read is reported to vLLM, which
computes it (kv_load_failure_policy must be "recompute").
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import blake3
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvtier._vllm_layout import WORKS_WITH, Settings, groups, layout
from kvtier._vllm_scheduler import LoadJob, SaveJob, Scheduler
from kvtier._vllm_worker import Worker
from kvtier.client import Client
from kvtier.errors import IncompatibleError

log = logging.getLogger("kvtier")


@dataclass
class KvtierMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


class KvtierConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Made by vLLM: once in the scheduler's process, once in each worker."""

    def __new__(cls, *_: Any, **__: Any) -> KvtierConnector:
        check_interface(cls)
        made: KvtierConnector = super().__new__(cls)
        return made

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
            raise IncompatibleError(
                'set "kv_load_failure_policy": "recompute": with "fail" a page that is lost fails requests'
            )
        settings, found = Settings.of(vllm_config), groups(vllm_config, kv_cache_config)
        space, ranks = layout(vllm_config, kv_cache_config), vllm_config.parallel_config.tensor_parallel_size
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            client = _client(settings, transfer.engine_id, (), 4096)
            self._scheduler = Scheduler(client, space, settings.salt, len(found), settings.fetch_timeout)
        else:
            rank = _rank() if ranks > 1 else 0
            client = _client(settings, transfer.engine_id, (rank,) if ranks > 1 else (), settings.staging_bytes)
            self._worker = Worker(client, space, settings.salt, found, rank, ranks)
        log.info(
            "kvtier connector: %s, %d blocks tokens, attached: %s", space.model, space.block_tokens, client.attached
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A best-effort cache: a save that is dropped is a miss later."""
        return False

    # The scheduler's side.

    def _sched(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._sched().matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._sched().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvtierMetadata:
        loads, saves = self._sched().jobs(scheduler_output)
        return KvtierMetadata(loads, saves)

    def update_connector_output(self, connector_output: Any) -> None:
        self._sched().loaded(set(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._sched().finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._sched().finished(request)
        return False, None

    # A worker's side.

    def _work(self) -> Worker:
        assert self._worker is not None
        return self._worker

    def _meta(self) -> KvtierMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, KvtierMetadata)
        return meta

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._work().register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._work().load(self._meta().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A block is stored with all its layers, by wait_for_save."""

    def wait_for_save(self) -> None:
        self._work().save(self._meta().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._work().received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work().load_errors()

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _client(settings: Settings, engine: str, ranks: tuple[int, ...], staging_bytes: int) -> Client:
    """Scheduler and workers of one engine are a group: its secret is made of the engine's random id."""
    import vllm

    return Client(
        settings.socket,
        token=settings.token,
        engine="vllm",
        engine_version=vllm.__version__[:64],
        group=engine[:64],
        group_secret=blake3.blake3(b"kvtier vllm group " + engine.encode()).digest(),
        ranks=ranks,
        staging_bytes=staging_bytes,
        stall_timeout=settings.stall_timeout,
    )


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def check_interface(connector: type) -> None:
    """Makes sure that the installed vLLM asks for no more than this connector has."""
    missing = sorted(getattr(connector, "__abstractmethods__", ()))
    if missing:
        import vllm

        raise IncompatibleError(
            f"vLLM {vllm.__version__} wants {', '.join(missing)} of a connector; this one works with {WORKS_WITH}"
        )

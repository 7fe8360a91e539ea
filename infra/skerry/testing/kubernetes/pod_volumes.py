"""The volumes of a pod as a kubelet mounts them: folders behind claims, and tokens and annotations as files.

The files of a pod are written once: a token is not renewed.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.local.docker_engine import Bind
from skerry.testing.kubernetes.scheduler_and_nodes import claims_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from skerry.testing.kubernetes.objects import Objects
    from skerry.testing.token_issuer import TokenIssuer

_ANNOTATION: Final = re.compile(r"metadata\.annotations\['([^']+)'\]")


class PodVolumes:
    """The volumes of one pod. folder: of this machine, for their files."""

    def __init__(self, pod: Mapping[str, Any], objects: Objects, tokens: TokenIssuer, folder: Path) -> None:
        self._pod = pod
        self._objects = objects
        self._tokens = tokens
        self._folder = folder / str(pod["metadata"]["uid"])
        self._namespace = str(pod["metadata"]["namespace"])

    def claimed(self, container: Mapping[str, Any]) -> list[Bind]:
        """The folders of this machine behind the pod's claims, where the container mounts them."""
        claims = claims_of(self._pod)
        binds: list[Bind] = []
        with self._objects.lock:
            for mount in container.get("volumeMounts") or ():
                if (claim := claims.get(mount["name"])) is not None:
                    row = self._objects.get("persistentvolumeclaims", self._namespace, claim)
                    volume = self._objects.get("persistentvolumes", "", row["spec"]["volumeName"])
                    source = str(volume["spec"]["hostPath"]["path"])
                    binds.append(Bind(source=source, target=str(mount["mountPath"])))
        return binds

    def projected(self, container: Mapping[str, Any]) -> list[Bind]:
        """The projected volumes, with their files, where the container mounts them."""
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes") or ()}
        binds: list[Bind] = []
        for mount in container.get("volumeMounts") or ():
            if files := dict(self._files(volumes[mount["name"]])):
                folder = self._folder / mount["name"]
                folder.mkdir(parents=True, exist_ok=True)
                for name, text in files.items():
                    (folder / name).write_text(text)
                binds.append(Bind(source=str(folder), target=str(mount["mountPath"]), writable=False))
        return binds

    def _files(self, volume: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for source in volume.get("projected", {}).get("sources", ()):
            if (token := source.get("serviceAccountToken")) is not None:
                yield token["path"], self._token(token["audience"], int(token["expirationSeconds"]))
            for item in source.get("downwardAPI", {}).get("items", ()):
                name = _ANNOTATION.fullmatch(item["fieldRef"]["fieldPath"])
                annotations = self._pod["metadata"].get("annotations") or {}
                yield item["path"], str(annotations.get(name[1] if name else "", ""))

    def _token(self, audience: str, life_s: int) -> str:
        now = int(dt.datetime.fromisoformat(self._objects.clock.utc_text()).timestamp())
        account = self._pod["spec"]["serviceAccountName"]
        pod = {name: self._pod["metadata"][name] for name in ("name", "uid")}
        return self._tokens.token(
            {
                "aud": [audience],
                "exp": now + life_s,
                "iat": now,
                "nbf": now,
                "sub": f"system:serviceaccount:{self._namespace}:{account}",
                "kubernetes.io": {"namespace": self._namespace, "pod": pod, "serviceaccount": {"name": account}},
            }
        )

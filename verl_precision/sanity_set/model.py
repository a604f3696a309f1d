"""Is there such a model? Asked before an engine starts, which takes a minute to find out."""

import re
from hashlib import sha256
from pathlib import Path

from verl_precision.errors import ConfigurationError

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_HEAD = 1 << 20  # bytes of each weight file that go into the fingerprint


def model_fingerprint(model: str) -> str:
    """Require that a model is there, and return what tells its weights from others.

    Args:
        model: a folder in Hugging Face format, or a hub name. Of a hub name, only config.json is fetched.

    Returns:
        For a folder a digest of config.json and of size and beginning of each weight file, for a hub name its commit.

    Raises:
        ConfigurationError: if there is no such folder, and no such name on the hub or, offline, in its cache.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _digest(model, folder)
    if folder.exists() or not _HUB_NAME.match(model):
        raise ConfigurationError(
            f"--model {model}: no such folder, and not a hub name. Allowed: a folder in Hugging Face format or a hub "
            "name (organisation/model). Check the spelling."
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json")).parent.name
    except LocalEntryNotFoundError:
        raise ConfigurationError(
            f"--model {model}: no such folder, not in the hub's cache on this machine, and the hub cannot be reached. "
            "Allowed: a folder, or a hub name that is cached or reachable. Download it first, or check the spelling."
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"--model {model}: no such folder, and the hub refuses the name ({type(error).__name__}: {reason}). "
            "Check the spelling, or log in if it is gated."
        ) from None


def _digest(model: str, folder: Path) -> str:
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigurationError(
            f"--model {model}: the folder has no config.json. Allowed: a folder in Hugging Face format. Check the path."
        )
    weights = sorted(file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
    if not weights:
        raise ConfigurationError(
            f"--model {model}: the folder has no weights (*.safetensors). Save or download it again."
        )
    digest = sha256(config.read_bytes())
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(_HEAD))
    return digest.hexdigest()[:16]

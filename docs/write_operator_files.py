"""Write the definitions that Prometheus shows, and its alert rules, anew: python docs/write_operator_files.py."""

import re
from pathlib import Path

import yaml

from verl_precision.mismatch.alarm import ADVICE
from verl_precision.tools.operators import prometheus
from verl_precision.tools.operators.prometheus import ALARM

ROOT, FOLDER = Path(__file__).resolve().parents[1], Path(prometheus.__file__).parent
# Ray takes only ASCII.
ASCII = {"π": "pi", "μ": "mu", "ρ": "rho", "χ": "chi", "Σ": "sum ", "√": "sqrt", "‖": "||", "½": "1/2", "≥": ">="}
ASCII |= {"±": "+-", "≤": "<=", "²": "^2", "³": "^3", "⁰": "0", "₀": "_0", "ₜ": "_t"}


def help_table() -> dict[str, str]:
    """Return the definitions that the pages of metrics give."""
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("metrics", "math", "precision")}
    text = pages["metrics"].partition("\n## All metrics\n")[2] + pages["math"]
    text += re.sub(r"^- (`precision/.*?`): ", r"| \1 | ", pages["precision"], flags=re.M)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| `\w+/[\w{]", line)]
    found = {}
    for names, words, *_ in rows:
        for key in re.findall(r"`(\w+/[\w/{}-]+)`", names):
            plain = re.sub(r"\[([^\]]+)\](\([^)]*\))?|`", r"\1", words)
            found.setdefault(key.removeprefix("actor/"), plain.translate(str.maketrans(ASCII)))
    return dict(sorted(found.items()))


def rules() -> dict:
    """Return a rule for each alarm, and one for a run that makes no step."""
    of_alarms = [
        {
            "alert": "VerlPrecision" + "".join(word.capitalize() for word in name.split("_")),
            "expr": f'ray_{ALARM}{{alarm="{name}"}} == 1',
            "labels": {"severity": "critical" if advice.severe else "warning", "alarm": name},
            "annotations": {
                "summary": "{{ $labels.run }}: the alarm " + name + " is active",
                **{"description": advice.meaning, "try_first": advice.try_first[0], "common_mistake": advice.mistake},
            },
        }
        for name, advice in ADVICE.items()
    ]
    stalled = {
        **{"alert": "VerlPrecisionNoStep", "expr": "changes(ray_verl_precision_step[1h]) == 0", "for": "1h"},
        "labels": {"severity": "warning"},
        "annotations": {"summary": "{{ $labels.run }}: no step has ended for two hours"},
    }
    return {"groups": [{"name": "verl_precision", "rules": [*of_alarms, stalled]}]}


def written(content: object) -> str:
    """Return the text of a file with this content."""
    header = "# Written by: python docs/write_operator_files.py\n"
    return header + yaml.safe_dump(content, allow_unicode=True, sort_keys=False, width=10**6)


if __name__ == "__main__":
    (FOLDER / "help.yaml").write_text(written(help_table()))
    (FOLDER / "alerts.yaml").write_text(written(rules()))

"""What a study does not cover, and with what it was made: the end of its report."""

from __future__ import annotations

import html

from eval.report import Section
from eval.signal_sources import NO_SIGNAL
from eval.study import StudyResult
from eval.study_config import BASELINE, deadline_text
from eval.study_looks import look_text
from eval.study_numbers import StudyNumbers, overload_sentence
from eval.surrogates import surrogate_notes
from serving_sim.profile import load_profile


def not_covered(numbers: StudyNumbers) -> list[str]:
    """Return what the study does not say, a sentence each."""
    config = numbers.stored.study.config
    kinds = {source.source.kind for source in numbers.stored.study.sources}
    origin = {
        "parametric": "Some lengths are drawn from fitted laws (parametric): they carry what was "
        "fitted, not more, and no text, so no text predictor is scored on them.",
        "sampled": "Some run logs were sampled, not decoded at temperature zero: their oracle is "
        "one of sampled runs, and says nothing about temperature zero.",
    }
    return [
        overload_sentence(numbers),
        *(text for kind, text in origin.items() if kind in kinds),
        *surrogate_notes(config.signals),
        f"One engine with the step times of {load_profile(config.profile).name}: no router, no "
        "replicas, no disaggregated prefill, no speculative decoding.",
        "Open loop: arrivals do not react to the service, and nobody gives up waiting.",
        f"One load of about {config.concurrency:g} requests at once and one shape of arrivals; "
        "pressure is set by the KV pool alone.",
        "Verdicts hold at one deadline; the section on other deadlines shows which would move.",
        "An interval for new sources treats sources as a sample; families share training data and "
        "habits, so it may still be too narrow.",
        "Rules of this study are not all rules: a hindsight search over victims is another study.",
    ]


def manifest(numbers: StudyNumbers) -> Section:
    """Return the command, the settings, and the inputs with their hashes."""
    lines = [f"{name}: {value}" for name, value in facts(numbers).items()]
    inputs = [f"{digest[:16]}  {name}" for name, digest in numbers.stored.inputs.items()]
    body = f"<pre>{html.escape(numbers.stored.command)}</pre>{bullets(lines)}"
    hashes = html.escape("\n".join(inputs))
    body += f"<details><summary>Inputs and their sha256</summary><pre>{hashes}</pre></details>"
    return Section("Command and manifest", body)


def facts(numbers: StudyNumbers) -> dict[str, str]:
    """Return the settings that a reader needs, by name."""
    stored, config = numbers.stored, numbers.stored.study.config
    profile = load_profile(config.profile)
    looks = {"looks": look_text(config)} if config.looks else {}
    return {
        "study": config.name,
        **looks,
        "seeds": f"{_seeds_text(stored.study)} judged; {config.num_pilots} pilot seeds apart",
        "deadline": f"{deadline_text(config)}, watched for {config.observe_s:g} s",
        "equivalence margin": f"{stored.study.margin_pp:g} pp, set before any comparison",
        "cohort": f"{config.num_tagged} scored requests a run after {config.num_warmup} warm-up",
        "policies": ", ".join(config.policies),
        "signals": ", ".join((NO_SIGNAL, *config.signals)),
        "baseline": BASELINE,
        "step times": f"{profile.name} ({profile.source})",
        "semantics (sha256 of the code)": stored.semantics[:16],
        "versions": ", ".join(f"{name} {value}" for name, value in stored.versions.items()),
    }


def bullets(lines: list[str]) -> str:
    """Return a list of plain texts."""
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _seeds_text(study: StudyResult) -> str:
    if not study.failures:
        return f"0 to {study.config.num_seeds - 1}"
    return f"{', '.join(map(str, study.seeds))} (of {study.config.num_seeds}; others failed)"

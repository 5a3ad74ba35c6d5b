"""Databases that people share through an object store or another machine: what one side has, the other one gets.

Both ways are a union of contributions: nothing is overwritten, and the same again changes nothing.
"""

from __future__ import annotations

from functools import partial

from whatif.opdb.merging import Merged, is_chosen, take_over
from whatif.opdb.remote import Remote
from whatif.opdb.store import Outcome, Store, check_device_of_times, is_sound
from whatif.runtime.errors import WhatifError
from whatif.runtime.progress import Progress


def push(
    store: Store, url: str, *, device: str | None = None, family: str | None = None, progress: Progress | None = None
) -> Merged:
    """Bring to the database at ``url`` what ``store`` has and it has not; only of ``device`` and ``family`` if named.

    Contributions that are damaged here, or whose times are there as those of another device, are refused, each with a
    sentence. Raises WhatifError where all are, or the other side cannot be written.
    """
    contributions, wrong = store.contributions()
    chosen = [c for c in contributions if is_chosen(c.provenance, device, family)]
    if not chosen and not wrong:
        raise WhatifError(f"{store.folder}: expected contributions to push, got none that fits.")
    remote = Remote.open(url, create=True)
    there, _ = remote.contributions()
    present = {listed.provenance.contribution for listed in there}
    known = {listed.provenance.times_sha256: listed.provenance.origin.device.name for listed in there}
    done = Merged(refused=list(wrong))
    for place, contribution in enumerate(chosen):
        if progress:
            progress(place, len(chosen))
        said = contribution.provenance
        if said.contribution in present:
            done.keep(said.contribution, Outcome.PRESENT, said.rows)
            continue
        try:
            contribution.read()  # nothing damaged travels on
            check_device_of_times(url, said.origin.device.name, said.times_sha256, said.rows, known)
        except WhatifError as error:
            done.refused.append(str(error))
            continue
        remote.put(contribution, contribution.sidecar.relative_to(store.folder).parts[:-1])
        known[said.times_sha256] = said.origin.device.name
        done.keep(said.contribution, Outcome.ADDED, said.rows)
    done.check()
    return done


def pull(
    url: str, store: Store, *, device: str | None = None, family: str | None = None, progress: Progress | None = None
) -> Merged:
    """Add to ``store`` what the database at ``url`` has and it has not; only of ``device`` and ``family`` if named.

    Every shard is checked against its sidecar's hash and written anew. What is damaged, or there under another device's
    name, is refused with a sentence. Raises WhatifError where all is, or the other side cannot be read.
    """
    remote = Remote.open(url)
    there, wrong = remote.contributions()
    chosen = [listed for listed in there if is_chosen(listed.provenance, device, family)]
    there_too = {listed.provenance.contribution for listed in chosen}
    own = {
        c.provenance.contribution
        for c in store.contributions()[0]
        if c.provenance.contribution in there_too and is_sound(c.sidecar)
    }
    return take_over([(c.provenance, partial(remote.read, c)) for c in chosen], wrong, store, url, progress, own)

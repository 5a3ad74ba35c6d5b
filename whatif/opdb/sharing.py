"""Share databases through an object store or another machine: push contributions to it, and pull them from it.

Either way is a union of contributions: nothing is overwritten, and a repeat changes nothing.
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
    """Add the contributions of ``store`` that the database at ``url`` lacks, limited to ``device`` and ``family``.

    Contributions that are damaged here, or whose times are stored there under another device, are refused, each with
    a reason. Raises WhatifError if all are, or the remote database cannot be written.
    """
    contributions, damaged = store.contributions()
    chosen = [c for c in contributions if is_chosen(c.provenance, device, family)]
    if not chosen and not damaged:
        raise WhatifError(f"{store.folder}: expected contributions to push, got no matching ones.")
    remote = Remote.open(url, create=True)
    remote_contributions, _ = remote.contributions()
    present = {listed.provenance.contribution for listed in remote_contributions}
    known = {listed.provenance.times_sha256: listed.provenance.origin.device.name for listed in remote_contributions}
    done = Merged(refused=list(damaged))
    for place, contribution in enumerate(chosen):
        if progress:
            progress(place, len(chosen))
        provenance = contribution.provenance
        if provenance.contribution in present:
            done.keep(provenance.contribution, Outcome.PRESENT, provenance.rows)
            continue
        try:
            contribution.read()  # refuses damaged shards
            check_device_of_times(url, provenance.origin.device.name, provenance.times_sha256, provenance.rows, known)
        except WhatifError as error:
            done.refused.append(str(error))
            continue
        remote.put(contribution, contribution.sidecar.relative_to(store.folder).parts[:-1])
        known[provenance.times_sha256] = provenance.origin.device.name
        done.keep(provenance.contribution, Outcome.ADDED, provenance.rows)
    done.check()
    return done


def pull(
    url: str, store: Store, *, device: str | None = None, family: str | None = None, progress: Progress | None = None
) -> Merged:
    """Add the contributions at ``url`` that ``store`` lacks, limited to ``device`` and ``family`` if given.

    Every shard is checked against its sidecar's hash and written anew. Contributions that are damaged, or stored under
    another device's name, are refused with a reason. Raises WhatifError if all are, or the remote cannot be read.
    """
    remote = Remote.open(url)
    remote_contributions, damaged = remote.contributions()
    chosen = [listed for listed in remote_contributions if is_chosen(listed.provenance, device, family)]
    there_too = {listed.provenance.contribution for listed in chosen}
    present = {
        c.provenance.contribution
        for c in store.contributions()[0]
        if c.provenance.contribution in there_too and is_sound(c.sidecar)
    }
    return take_over([(c.provenance, partial(remote.read, c)) for c in chosen], damaged, store, url, progress, present)

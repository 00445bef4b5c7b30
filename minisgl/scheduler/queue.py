"""WaitingQueue: who is admitted next, under each policy. Every operation is O(1) or O(log n), amortised."""

import heapq
from collections.abc import Callable

from minisgl.config import SchedulePolicy
from minisgl.request import Int32, Request

PRIORITY_STEP_S = 60.0
"""A level of priority outranks this much waiting, so that a low priority is served in the end."""
WINDOW = 16
"""`lpm` compares the prefixes of this many requests at most, so that a step's matching is bounded."""
PATIENCE = 32
"""`lpm` lets a request be passed over this often before it goes first."""

Entry = tuple[float, float, int, Request]
"""Rank, arrival and key: of several clients' requests, keys alone do not tell who came first."""


class WaitingQueue:
    """Requests that hold no slot. A retracted one goes to the front (under priority: to its old place).

    `remove` only forgets a request; its entry is dropped when it comes up.
    """

    def __init__(self, policy: SchedulePolicy, match_length: Callable[[Int32], int]) -> None:
        self._policy: SchedulePolicy = policy
        self._match_length = match_length
        self._heap: list[Entry] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        """Add a request; those that arrived at once go by their keys."""
        self._members.add(request)
        heapq.heappush(self._heap, (self._rank(request), request.arrival_s, request.key, request))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._members.discard(request)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[-1] in self._members]
            heapq.heapify(self._heap)

    def select(self) -> Request | None:
        """The request to admit next; it stays in the queue until it is removed."""
        if self._policy != "lpm":
            while self._heap and self._heap[0][-1] not in self._members:
                heapq.heappop(self._heap)
            return self._heap[0][-1] if self._heap else None
        window = self._front(WINDOW)
        if not window:
            return None
        head = window[0]
        if head.retractions or head.passed_over >= PATIENCE or len(window) == 1:
            return head
        return max(window, key=lambda r: self._match_length(r.known))  # the first of equals

    def take(self, request: Request) -> None:
        """Remove a request that is admitted; under lpm those before it have been passed over."""
        if self._policy == "lpm":
            head = next(iter(self._front(1)), request)
            head.passed_over += head is not request
        self.remove(request)

    def requests(self) -> list[Request]:
        """All that wait, in no order."""
        return list(self._members)

    def _rank(self, request: Request) -> float:
        if self._policy == "priority":
            return request.arrival_s - PRIORITY_STEP_S * request.priority
        return 0.0 if request.retractions else 1.0

    def _front(self, count: int) -> list[Request]:
        entries: list[Entry] = []
        while self._heap and len(entries) < count:
            entry = heapq.heappop(self._heap)
            if entry[-1] in self._members:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return [entry[-1] for entry in entries]

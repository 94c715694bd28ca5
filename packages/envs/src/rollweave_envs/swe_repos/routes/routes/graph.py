"""Directed graphs with lengths."""

import heapq
from collections import deque


class NoWayError(ValueError):
    """There is no way, or no order."""


class Graph:
    def __init__(self, edges=()):
        self._next = {}
        for source, target, length in edges:
            self.add(source, target, length)

    def add(self, source, target, length=1):
        """Of two edges between the same nodes the shorter one counts. Raises ValueError for a negative length."""
        if length < 0:
            raise ValueError(f"length must not be negative, got {length}")
        self._next.setdefault(target, {})
        ways = self._next.setdefault(source, {})
        ways[target] = min(length, ways.get(target, length))

    def nodes(self):
        return sorted(self._next)

    def following(self, node):
        """{node: length}, a copy."""
        return dict(self._next[node])

    def reverse(self):
        turned = Graph()
        for source, ways in self._next.items():
            turned._next.setdefault(source, {})
            for target, length in ways.items():
                turned.add(target, source, length)
        return turned

    def shortest(self, source, target):
        """(length, nodes) of the shortest way; of equal ones that which is first by its nodes. Raises NoWayError."""
        heap = [(0, [source])]
        done = set()
        while heap:
            length, way = heapq.heappop(heap)
            node = way[-1]
            if node == target:
                return length, way
            if node in done:
                continue
            done.add(node)
            for other, more in self._next.get(node, {}).items():
                if other not in done:
                    heapq.heappush(heap, (length + more, [*way, other]))
        raise NoWayError(f"no way from {source} to {target}")

    def within(self, source, length):
        """{node: distance} of all that are at most so far away."""
        found = {}
        heap = [(0, source)]
        while heap:
            far, node = heapq.heappop(heap)
            if node in found or far > length:
                continue
            found[node] = far
            for other, more in self._next.get(node, {}).items():
                heapq.heappush(heap, (far + more, other))
        return found

    def hops(self, source, target):
        """The least number of edges. Raises NoWayError."""
        queue = deque([(source, 0)])
        seen = {source}
        while queue:
            node, count = queue.popleft()
            if node == target:
                return count
            for other in self._next.get(node, {}):
                if other not in seen:
                    seen.add(other)
                    queue.append((other, count + 1))
        raise NoWayError(f"no way from {source} to {target}")

    def order(self):
        """Nodes so that every edge points forward; of those that may come next the first by name. Raises NoWayError."""
        waiting = {node: 0 for node in self._next}
        for ways in self._next.values():
            for target in ways:
                waiting[target] += 1
        ready = [node for node, count in waiting.items() if count == 0]
        heapq.heapify(ready)
        found = []
        while ready:
            node = heapq.heappop(ready)
            found.append(node)
            for target in self._next[node]:
                waiting[target] -= 1
                if waiting[target] == 0:
                    heapq.heappush(ready, target)
        if len(found) < len(self._next):
            raise NoWayError("there is a circle")
        return found

    def islands(self):
        """Sets of nodes that are connected, whatever the direction; the largest first, of equal ones by their first node."""
        both = self.reverse()
        left = set(self._next)
        found = []
        while left:
            todo = [min(left)]
            island = set(todo)
            while todo:
                node = todo.pop()
                for other in (*self._next[node], *both._next[node]):
                    if other not in island:
                        island.add(other)
                        todo.append(other)
            left -= island
            found.append(sorted(island))
        return sorted(found, key=lambda island: (-len(island), island[0]))

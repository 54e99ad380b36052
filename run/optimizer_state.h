// The optimizer's state on its way between all ranks and rank 0's checkpoint, in the order in which
// a single rank has it: m, v and master, each in the order of the parameters. If the optimizer is
// sharded, the state moves in windows that fit into the memory of activations, where rank 0 puts
// the ranks' parts together.
#pragma once
#include <algorithm>

#include "data/file.h"
#include "parallel/ranks.h"
#include "parallel/shards.h"
#include "run/collectives.h"

namespace optimizer_state {

// Elements of the whole state.
struct Window {
    size_t begin;
    size_t end;
};

// Copies n elements between `own`, memory of rank r, and `whole`, memory of rank 0.
template <class Model, class A>
void copy_to_or_from_rank_0(Model& m, int r, A* own, A* whole, size_t n, bool to_rank_0) {
    const size_t bytes = n * sizeof(A);
    if (r == 0) {
        m.dev.copy(to_rank_0 ? whole : own, to_rank_0 ? own : whole, bytes);
        return;
    }
    auto& comm = *m.ranks.comm;
    const bool is_rank_0 = m.ranks.rank == 0;
    in_order(comm, [&] {
        if (is_rank_0 && to_rank_0)
            comm.recv(r, whole, bytes);
        else if (is_rank_0)
            comm.send(r, whole, bytes);
        else if (to_rank_0)
            comm.send(0, own, bytes);
        else
            comm.recv(0, own, bytes);
    });
}

// Copies what every rank has of a window to `staged` on rank 0, or from there. All ranks call this
// together.
template <class Model>
void exchange(Model& m, const Window& window, typename Model::A* staged, bool to_rank_0) {
    const size_t n = m.num_parameters;
    const size_t own_n = n / m.ranks.size;
    auto* const own = m.optimizer().m;  // v and master follow without a gap
    for (size_t array = window.begin / n; array * n < window.end; array++) {
        const size_t array_begin = array * n;
        const size_t first = std::max(window.begin, array_begin) - array_begin;
        const size_t last = std::min(window.end, array_begin + n) - array_begin;
        for (int r = 0; r < m.ranks.size; r++) {
            if (m.ranks.rank != 0 && m.ranks.rank != r)
                continue;
            for_each_part(m.share(r), first, last, [&](const SharePart& part) {
                copy_to_or_from_rank_0(m, r, own + (array * own_n + part.state),
                                       staged + (array_begin + part.parameter - window.begin),
                                       part.count, to_rank_0);
            });
        }
    }
}

// Calls f(window) for the windows of a sharded state. Each is a whole number of a checksum's steps.
template <class Model, class F>
void for_each_window(Model& m, F f) {
    using A = typename Model::A;
    const size_t most = m.acts.bytes / Checksum64::kStep * Checksum64::kStep / sizeof(A);
    const size_t all = m.num_parameters * (m.has_master ? 3 : 2);
    for (size_t begin = 0; begin < all; begin += most) {
        f(Window{begin, std::min(all, begin + most)});
        note_progress();
    }
}

}  // namespace optimizer_state

// A piece of the whole state in rank 0's device memory.
struct StatePiece {
    size_t offset;  // in the whole state
    char* device;
    size_t bytes;
};

// Calls read(piece) on rank 0 for one piece of the state after the other. All ranks call this
// together.
template <class Model, class Read>
void gather_optimizer(Model& m, Read read) {
    using A = typename Model::A;
    const bool is_rank_0 = m.ranks.rank == 0;
    if (!m.ranks.sharded) {
        if (is_rank_0)
            read(StatePiece{.offset = 0, .device = m.adam.base, .bytes = m.adam.bytes});
        return;
    }
    optimizer_state::for_each_window(m, [&](const optimizer_state::Window& window) {
        A* const staged = reinterpret_cast<A*>(m.acts.base);
        optimizer_state::exchange(m, window, staged, true);
        if (is_rank_0)
            read(StatePiece{.offset = window.begin * sizeof(A),
                            .device = m.acts.base,
                            .bytes = (window.end - window.begin) * sizeof(A)});
    });
}

// Calls write(piece) on rank 0 for one piece of the state after the other, and gives every rank its
// part.
template <class Model, class Write>
void scatter_optimizer(Model& m, Write write) {
    using A = typename Model::A;
    const bool is_rank_0 = m.ranks.rank == 0;
    if (!m.ranks.sharded) {
        if (is_rank_0)
            write(StatePiece{.offset = 0, .device = m.adam.base, .bytes = m.adam.bytes});
        broadcast(m, m.adam);
        return;
    }
    optimizer_state::for_each_window(m, [&](const optimizer_state::Window& window) {
        A* const staged = reinterpret_cast<A*>(m.acts.base);
        if (is_rank_0)
            write(StatePiece{.offset = window.begin * sizeof(A),
                             .device = m.acts.base,
                             .bytes = (window.end - window.begin) * sizeof(A)});
        optimizer_state::exchange(m, window, staged, false);
    });
}

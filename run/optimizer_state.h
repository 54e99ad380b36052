// Moves the optimizer's state between all ranks and rank 0, which writes and reads checkpoints. In
// a checkpoint the state has the order in which a single rank has it, for any number of ranks: m, v
// and master, each in the order of the parameters. If the optimizer is sharded, rank 0 assembles it
// from the ranks' shares, one window after another, in the memory of the activations.
#pragma once
#include <algorithm>

#include "data/file.h"
#include "parallel/ranks.h"
#include "parallel/shards.h"
#include "run/collectives.h"

namespace optimizer_state {

enum class Direction { to_rank_0, from_rank_0 };

// A part of the whole state, in elements.
struct Window {
    size_t begin;
    size_t end;
};

// Copies n elements between `own`, memory of rank r, and `whole`, memory of rank 0. Both ranks make
// this call, and each uses only the pointers to its own memory.
template <class Model, class A>
void copy(Model& m, Direction direction, int r, A* own, A* whole, size_t n) {
    const size_t bytes = n * sizeof(A);
    const bool to_rank_0 = direction == Direction::to_rank_0;
    if (r == 0) {
        if (to_rank_0)
            m.dev.copy(whole, own, bytes);
        else
            m.dev.copy(own, whole, bytes);
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

// Copies what each rank owns of a window to `staged`, memory of rank 0, or from there. All ranks
// call this together.
template <class Model>
void exchange(Model& m, Direction direction, const Window& window, typename Model::A* staged) {
    // Both the whole state and a rank's own consist of the arrays m (0), v (1) and master (2),
    // without gaps.
    const size_t whole_size = m.num_parameters;  // of an array, in elements
    const size_t own_size = m.sizes.own_parameters;
    auto* const own = m.optimizer().m;  // the first array, and so the beginning of all

    for (size_t array = window.begin / whole_size; array * whole_size < window.end; array++) {
        const size_t whole_begin = array * whole_size;
        const size_t own_begin = array * own_size;
        // The window's parameters in this array.
        const size_t begin = std::max(window.begin, whole_begin) - whole_begin;
        const size_t end = std::min(window.end, whole_begin + whole_size) - whole_begin;
        for (int r = 0; r < m.ranks.size; r++) {
            if (m.ranks.rank != 0 && m.ranks.rank != r)
                continue;
            for_each_part(m.share(r), begin, end, [&](const SharePart& part) {
                const size_t in_own = own_begin + part.state_begin;
                const size_t in_window = whole_begin + part.begin - window.begin;
                copy(m, direction, r, own + in_own, staged + in_window, part.size);
            });
        }
    }
}

// Calls f(window) for all windows of a sharded state. All but the last are whole steps of the
// checksum.
template <class Model, class F>
void for_each_window(Model& m, F f) {
    using A = typename Model::A;
    const size_t steps = m.acts.bytes / Checksum64::kStep;
    const size_t most = steps * Checksum64::kStep / sizeof(A);
    const size_t all = m.num_parameters * (m.has_master ? 3 : 2);
    for (size_t begin = 0; begin < all; begin += most) {
        f(Window{.begin = begin, .end = std::min(all, begin + most)});
        note_progress();
    }
}

}  // namespace optimizer_state

// A piece of the whole state, in rank 0's device memory.
struct StatePiece {
    size_t offset;  // in the whole state, in bytes
    char* device;
    size_t bytes;
};

// On rank 0, calls read(piece) for one piece of the whole state after another. All ranks call this
// together.
template <class Model, class Read>
void gather_optimizer(Model& m, Read read) {
    using A = typename Model::A;
    using namespace optimizer_state;
    const bool is_rank_0 = m.ranks.rank == 0;
    if (!m.ranks.sharded) {
        if (is_rank_0)
            read(StatePiece{.offset = 0, .device = m.adam.base, .bytes = m.adam.bytes});
        return;
    }

    for_each_window(m, [&](const Window& window) {
        A* const staged = reinterpret_cast<A*>(m.acts.base);
        exchange(m, Direction::to_rank_0, window, staged);
        if (is_rank_0)
            read(StatePiece{.offset = window.begin * sizeof(A),
                            .device = m.acts.base,
                            .bytes = (window.end - window.begin) * sizeof(A)});
    });
}

// On rank 0, calls write(piece) for one piece of the whole state after another, and sends every
// rank its share. All ranks call this together.
template <class Model, class Write>
void scatter_optimizer(Model& m, Write write) {
    using A = typename Model::A;
    using namespace optimizer_state;
    const bool is_rank_0 = m.ranks.rank == 0;
    if (!m.ranks.sharded) {
        if (is_rank_0)
            write(StatePiece{.offset = 0, .device = m.adam.base, .bytes = m.adam.bytes});
        broadcast(m, m.adam);
        return;
    }

    for_each_window(m, [&](const Window& window) {
        A* const staged = reinterpret_cast<A*>(m.acts.base);
        if (is_rank_0)
            write(StatePiece{.offset = window.begin * sizeof(A),
                             .device = m.acts.base,
                             .bytes = (window.end - window.begin) * sizeof(A)});
        exchange(m, Direction::from_rank_0, window, staged);
    });
}

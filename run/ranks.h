// Several ranks. In data parallel training rank r of n trains on micro-batches r, r + n, … of every step, and gradients
// are summed over the ranks. If the optimizer is sharded (ZeRO-1, Rajbhandari et al. 2020), a rank gets only its share
// of the summed gradients. It keeps optimizer state and updates parameters for that share alone, and then all ranks
// gather the parameters.
//
// Gradients are summed all at once after backward, or with --overlap each layer's matmul weights as soon as backward
// has finished that layer. Between machines there is much time to hide. On one machine hiding it costs more than it
// saves, because NCCL's blocks and the power they draw are missing in backward. On 4 H200s with 124M at B = 64 a step
// takes 105.5 ms without any sums, 108.0 with all at its end, and 109.4 with each layer's beside backward.
//
// Rank r's share is part r of n of every tensor, or of each layer's part of a tensor that is summed by layer. The
// gradients and the state of a share lie back to back.
//
// In context parallel training groups of `context` neighbouring ranks share their sequences. Each rank has two chunks
// of every sequence (attention/ring/ring.h), and a group reads the batches that a single rank would read otherwise.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "data/loader.h"
#include "layers/layers.h"
#include "parallel/comm.h"
#include "parallel/watchdog.h"
#include "run/buffers.h"
#include "run/range.h"
#include "run/settings.h"
#include "run/tensors.h"

inline bool by_layer(const TensorSpec& t, bool overlap) {
    return overlap && t.matmul && t.layers > 0;
}
inline std::vector<ParamRange> share_of(const Arena& params, int rank, int ranks, bool overlap) {
    std::vector<ParamRange> share;
    size_t at = 0, state = 0;
    for (const TensorSpec& t : params.tensors) {
        const size_t pieces = by_layer(t, overlap && ranks > 1) ? t.layers : 1, stride = t.elements() / pieces;
        const size_t size = stride / ranks, begin = at + rank % ranks * size;  // undivided, all is every rank's
        share.push_back({begin, size, t.decay, pieces, stride, begin - state});
        at += t.elements(), state += pieces * size;
    }
    return share;
}

// Calls f(place among all parameters, place in the share's state, elements) for what a share has of the parameters
// from `begin` to `end`.
template <class F>
void for_each_part(const std::vector<ParamRange>& share, size_t begin, size_t end, F f) {
    for (const ParamRange& r : share)
        for (size_t p = 0; p < r.pieces; p++) {
            const size_t first = std::max(begin, r.piece(p));
            const size_t last = std::min(end, r.piece(p) + r.size);
            if (first < last) f(first, r.state(p) + (first - r.piece(p)), last - first);
        }
}

inline std::atomic<int> g_step = 0;  // at work, for the watchdog's message

// --timeout is for ordinary steps. The first one makes plans and connections, and before it data is read.
inline double long_timeout(const Options& o) {
    return std::max(o.timeout, 300);
}

// What a model needs to know about the other ranks. By default it is alone.
template <class Dev>
struct Ranks {
    using Comm = typename Dev::Comm;
    std::shared_ptr<Comm> comm, sharers;  // of all ranks, and of those that share sequences
    Watchdog* watchdog = nullptr;
    int rank = 0, size = 1;
    int local_size = 1;  // of this machine
    bool sharded = false, overlap = false;
    int context = 1;  // ranks that share a sequence

    // Every rank's value, by rank. All ranks make these calls together.
    template <class T>
    std::vector<T> gather(const T& mine) const {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(size, mine);
        if (size > 1) comm->host_all_gather(all.data(), sizeof(T));
        return all;
    }
    // x ← the sum over the ranks, in their order.
    void add_up(std::vector<double>& x) const {
        if (size == 1 || x.empty()) return;
        std::vector<double> all(size * x.size());
        std::copy(x.begin(), x.end(), all.begin() + rank * x.size());
        comm->host_all_gather(all.data(), x.size() * sizeof(double));
        for (size_t i = 0; i < x.size(); i++) {
            x[i] = 0;
            for (int r = 0; r < size; r++) x[i] += all[r * x.size() + i];
        }
    }
    void meet() const { gather(0); }
    // A rank that makes no progress for so many seconds gives up. 0: nobody waits for progress.
    void allow(double seconds) const {
        if (watchdog) watchdog->allow(seconds);
    }

    int groups() const { return size / context; }        // each with sequences of its own
    int group() const { return rank / context; }         // this rank's
    int context_rank() const { return rank % context; }  // within it
};

// All ranks of a group read the same sequences, and each keeps its own tokens of them: tokens, then targets.
template <class Model>
void next_tokens(const Model& m, int* host, Loader& loader) {
    const size_t N = m.sizes.N, all = N * m.ranks.context;
    if (m.ranks.context == 1) return loader.next(host, host + N);
    std::vector<int> whole(2 * all);
    loader.next(whole.data(), whole.data() + all);
    const Positions at = m.positions();
    for (int part = 0; part < 2; part++)
        for (int b = 0; b < m.B; b++)
            for (int t = 0; t < m.T; t++)
                host[part * N + size_t(b) * m.T + t] = whole[part * all + size_t(b) * m.sequence() + at.of(t)];
}

constexpr int kNoLayer = -1;

// Starts summing a layer's gradients over the ranks, or with kNoLayer those of all tensors that do not go by layer.
template <class Model>
void sum_gradients(Model& m, int layer = kNoLayer) {
    if (layer != kNoLayer && !m.ranks.overlap) return;
    Range range("sum gradients");
    auto& comm = *m.ranks.comm;
    const std::vector<ParamRange> own = m.share(m.ranks.rank);
    const int l = std::max(layer, 0);
    comm.fork();
    comm.group([&] {
        for (size_t i = 0; i < m.params.tensors.size(); i++) {
            const TensorSpec& t = m.params.tensors[i];
            if (by_layer(t, m.ranks.overlap) != (layer != kNoLayer)) continue;
            auto* const g = static_cast<typename Model::A*>(m.grads.at(i, l));
            if (m.ranks.sharded)
                comm.reduce_scatter(m.workspace().share + own[i].state(l), g, own[i].size);
            else
                comm.all_reduce(g, layer == kNoLayer ? t.elements() : t.size);
        }
    });
}

// Every rank gets all losses of the step. Afterwards the sums of gradients have come too.
template <class Model>
void gather_losses(Model& m) {
    m.ranks.comm->all_gather(m.stats(), m.micro_steps);
    m.ranks.comm->join();
}

// Calls between what the device does now and what it does next.
template <class Comm, class F>
void in_line(Comm& comm, F calls) {
    comm.fork();
    calls();
    comm.join();
}

// Every rank's `mine` comes to workspace().ends, behind what the device does now.
template <class Model>
void gather_ends(Model& m, const int* mine) {
    int* const ends = m.workspace().ends;
    m.dev.upload(ends + m.ranks.rank, mine, sizeof(int));
    in_line(*m.ranks.comm, [&] { m.ranks.comm->all_gather(ends, 1); });
}

// The summed gradients that this rank updates with, and after them a gate of zeros.
template <class Model>
typename Model::A* gradients_to_update(Model& m) {
    if (!m.ranks.sharded) return m.gradients().wte;  // clear_gradients() made the zeros
    auto* const g = m.workspace().share;
    m.dev.zero(g + m.sizes.parameters, kGate * sizeof(*g));
    return g;
}

// The norm over all ranks. Of a sharded optimizer's gradients it is the norm of the shares' norms.
template <class Model>
const typename Model::A* norm_of_gradients(Model& m, const typename Model::A* g, size_t n) {
    auto *const norm = m.stats() + m.num_losses(), *const norms = norm + 1, *const own = norms + m.ranks.rank;
    void* const scratch = m.workspace().scratch;
    global_norm(m.dev, m.ranks.sharded ? own : norm, scratch, g, n);
    if (!m.ranks.sharded) return norm;
    in_line(*m.ranks.comm, [&] { m.ranks.comm->all_gather(norms, 1); });
    global_norm(m.dev, norm, scratch, norms, m.ranks.size);
    return norm;
}

// Gathers the ranks' updated shares of the parameters on all ranks.
template <class Model>
void gather_parameters(Model& m) {
    auto& comm = *m.ranks.comm;
    const auto gather = [&] {
        for (const ParamRange& r : m.share(0))  // rank 0's pieces are where each tensor's begin
            for (size_t p = 0; p < r.pieces; p++) comm.all_gather(m.weights().wte + r.piece(p), r.size);
    };
    in_line(comm, [&] { comm.group(gather); });
}

// Rank 0's parameters, or its whole optimizer's state, come to all ranks.
template <class Model>
void send_to_all(Model& m, Arena Model::*arena) {
    if (m.ranks.size == 1) return;
    in_line(*m.ranks.comm, [&] { m.ranks.comm->broadcast((m.*arena).base, (m.*arena).bytes); });
}

// Moves the optimizer's state from all ranks to rank 0's host if `fetch`, else back, in the order in which a single rank
// has it: m, v and master, each in the order of the parameters. On rank 0 it calls f(offset, device, bytes) for one piece
// after the other. If the state is sharded, pieces are put together in the memory of activations.
template <class Model, class F>
void move_optimizer(Model& m, bool fetch, F f) {
    using A = typename Model::A;
    const auto& ranks = m.ranks;
    auto& comm = *ranks.comm;
    if (!ranks.sharded) {
        if (ranks.rank == 0) f(0, m.adam.base, m.adam.bytes);
        if (!fetch) send_to_all(m, &Model::adam);
        return;
    }
    const size_t most = m.acts.bytes / Checksum64::kStep * Checksum64::kStep / sizeof(A);
    const size_t n = m.num_parameters;
    const size_t own_n = n / ranks.size;
    const size_t all = n * (m.has_master ? 3 : 2);
    A* const staged = reinterpret_cast<A*>(m.acts.base);
    for (size_t begin = 0; begin < all; begin += most) {
        const size_t end = std::min(all, begin + most);
        const size_t offset = begin * sizeof(A);
        const size_t bytes = (end - begin) * sizeof(A);
        if (ranks.rank == 0 && !fetch) f(offset, m.acts.base, bytes);
        // What rank r has of array `array`'s elements from `first` to `last`.
        const auto exchange = [&](int r, size_t array, size_t first, size_t last) {
            for_each_part(m.share(r), first, last, [&](size_t at, size_t state, size_t count) {
                A* const there = staged + (array * n + at - begin);
                A* const own = m.optimizer().m + (array * own_n + state);
                const size_t size = count * sizeof(A);
                if (r > 0) {
                    A* const x = ranks.rank == 0 ? there : own;
                    const bool sends = (ranks.rank == 0) != fetch;
                    const int peer = ranks.rank == 0 ? r : 0;
                    in_line(comm, [&] { sends ? comm.send(peer, x, size) : comm.recv(peer, x, size); });
                } else {
                    m.dev.copy(fetch ? there : own, fetch ? own : there, size);
                }
            });
        };
        for (size_t array = begin / n; array * n < end; array++) {
            const size_t first = std::max(begin, array * n) - array * n;
            const size_t last = std::min(end, (array + 1) * n) - array * n;
            for (int r = 0; r < ranks.size; r++)
                if (ranks.rank == 0 || ranks.rank == r) exchange(r, array, first, last);
        }
        if (ranks.rank == 0 && fetch) f(offset, m.acts.base, bytes);
    }
}

// The tile scheduler of flash_bf16_sm90's backward: which tiles a block works on, and in which
// order the blocks add up dQ, so that two runs give the same bits.
//
// A work tile is 128 keys of one head. The block that has it walks over all query tiles that see
// those keys. It owns their dK and dV; of each query tile's dQ it computes one part.
//
// dQ in a fixed order. The parts of a query tile's dQ are added one key tile after the other, in an
// order that depends on the shape alone. A semaphore counts how many have been added, and each key
// tile waits until the count says that it is next. The first writes the sum in global memory, the
// others add to it, and the last fetches it, adds its own part in registers and writes dQ. Each of
// a block's two consumers does so for its half of dQ, and each half has a sum and a semaphore.
//
// Two directions. Take a causal head of four key tiles, k0 to k3, and four query tiles, q0 to q3.
// Query tile q2 sees k0, k1 and k2, so three parts make up its dQ. Rows are work tiles in the order
// of their tickets, and t is the time, in query tiles. Down a diagonal, one can follow a query tile
// from the key tile that adds first to the one that adds last:
//
//   forwards, from the diagonal on            backwards, to the diagonal
//   k3 first, dQ's sum ends with k0           k0 first, dQ's sum begins with k0
//
//   ticket  keys  t=1  t=2  t=3  t=4          ticket  keys  t=1  t=2  t=3  t=4
//   0       k3    q3                          0       k0    q3   q2   q1   q0
//   1       k2    q2   q3                     1       k1         q3   q2   q1
//   2       k1    q1   q2   q3                2       k2              q3   q2
//   3       k0    q0   q1   q2   q3           3       k3                   q3
//
// On the left q3 is with k3, k2, k1 and k0 at times 1, 2, 3 and 4. All work tiles can start at
// once, as each is one query tile behind the one that adds before it, and none waits. But the
// longest work tile has the last ticket, so that at the end of the kernel most SMs would be idle.
// On the right q3 is with k0, k1, k2 and k3 at those times. Here each work tile has to start one
// query tile later than the one before it; they all finish together, and the shortest comes last.
//
// So all heads walk forwards, except in the group of heads that runs last, which walks backwards. A
// group is as many heads as fit into half of L2 and are worked on together. Groups run from the
// last heads to the first, so the group that runs last is heads 0 to group − 1. If a sequence is so
// long that a group is a single head, every second or third head walks backwards. Its work tiles
// start one after another, while those of the head before it finish one after another, so each fits
// behind one of those.
//
// No deadlock. A block waits only for work tiles with lower tickets than its own. Blocks that are
// running have taken those, and each works through its own in order. So the unfinished one with the
// lowest ticket waits for nobody. (The last query tile of a work tile also waits for the next work
// tile's loads, but these need only what the same block has already done.) So only who gets which
// ticket varies from run to run, and no sum depends on that.
#pragma once
#include <algorithm>

#include "attention/launch.h"

// A tile of keys of one head.
struct BackwardWorkTile {
    int k_tile;  // −1: there are no more
    int bh;
};

// The query tiles that see a work tile, in the order in which its block walks over them: the next
// is i, then i + step, and `left` of them remain.
struct QueryWalk {
    int i;
    int step;
    int left;

    __device__ __forceinline__ bool forwards() const { return step > 0; }
    __device__ __forceinline__ int previous() const { return i - step; }
    __device__ __forceinline__ int next() const { return i + step; }
    __device__ __forceinline__ void operator++() {
        i += step;
        left--;
    }
};

// A query tile's dQ is the sum of parts 0 to `last`, one of each key tile that it sees, in the
// order in which they are added.
struct DqPart {
    int number;
    int last;

    __device__ __forceinline__ bool is_first() const { return number == 0; }
    __device__ __forceinline__ bool is_last() const { return number == last; }
};

template <int Br, int Bc>  // queries and keys of a tile
struct BackwardTileScheduler {
    int NH;
    int heads;  // B·NH
    int Tq;
    int Tk;
    int shift;  // query i sees keys j ≤ i + shift
    int q_tiles;
    int k_tiles;
    bool masked;    // some query does not see some key
    int group;      // heads that are worked on together
    int period;     // if group is 1: every period-th head walks backwards
    int sum_heads;  // how many heads have room for their sums of dQ at once
    // For how many query tiles' sums scratch has room. sum_heads·q_tiles would be enough, but may
    // fall as q_tiles grows, because `group` falls. `sums` is at least that and never falls, so
    // scratch that is enough for a call is also enough for one with fewer queries.
    size_t sums;

    explicit BackwardTileScheduler(const AttentionShape& s)
        : NH(s.NH), heads(s.B * s.NH), Tq(s.Tq), Tk(s.Tk), shift(s.shift()) {
        q_tiles = ceil_div(s.Tq, Br);
        k_tiles = ceil_div(s.Tk, Bc);
        masked = shift < s.Tk - 1;

        // Q, dO and the sum of dQ of a group's heads fill half of L2. In short sequences that would
        // be many heads, and a head's key tiles would be worked on far apart: without most_heads,
        // T = 1024 is 4 % slower (HS 128: 6 %).
        constexpr int kHalfOfL2 = 24 << 20;
        constexpr int kBytes = 2 * sizeof(bf16) + sizeof(float);  // an element of the three
        const int group_tiles = kHalfOfL2 / (Br * s.HS * kBytes);
        const int most_heads = 2048 / s.HS;
        group = std::clamp(group_tiles / q_tiles, 1, most_heads);
        // With 12 heads 3 is 1 % faster than 2, with 16 heads 1 % slower.
        period = NH % 3 == 0 ? 3 : 2;

        // Room for 3 groups, but for 6 heads if a group is a single large one. With room for 3 the
        // 4th would wait, because a head's last key tiles are slow.
        sum_heads = std::min(heads, std::max(6, 3 * group));
        // Not less than sum_heads·q_tiles: if a group is a single head, sum_heads is at most 6.
        // Otherwise it is at most 3·group, and group·q_tiles is at most group_tiles.
        sums = std::min<size_t>(std::min(heads, 3 * most_heads) * size_t(q_tiles),
                                std::max(3 * group_tiles, 6 * q_tiles));
    }

    // The work tile of a ticket. Groups of heads follow one another, from the last heads to the
    // first. Within a group all heads have one key tile, then all have the next.
    __device__ __forceinline__ BackwardWorkTile work_tile(int ticket) const {
        // Counted from the last ticket, groups are in the order of their heads, and all but the one
        // with the last heads are whole.
        const int later = heads * k_tiles - 1 - ticket;  // tickets after this one
        if (later < 0)
            return {.k_tile = -1, .bh = -1};

        const int tiles_of_group = group * k_tiles;
        const int first_head = later / tiles_of_group * group;
        const int heads_of_group = min(group, heads - first_head);
        const int later_of_group = later % tiles_of_group;
        const int later_of_head = later_of_group / heads_of_group;  // its key tiles yet to come
        const int bh = first_head + later_of_group % heads_of_group;
        const int k_tile = walks_forwards(bh) ? later_of_head : k_tiles - 1 - later_of_head;
        return {.k_tile = k_tile, .bh = bh};
    }

    // A head's direction depends on its own number and the shape alone, because it decides in which
    // order dQ, dK and dV are added up. Where every period-th head walks backwards, these are the
    // same heads in each sequence. Without a mask all heads walk backwards.
    __device__ __forceinline__ bool walks_forwards(int bh) const {
        const int h = bh % NH;
        return masked && (group == 1 ? h % period > 0 : bh >= group);
    }

    __device__ __forceinline__ QueryWalk query_walk(BackwardWorkTile tile) const {
        const int first_query = max(0, tile.k_tile * Bc - shift);  // that sees the tile's first key
        const int first = first_query / Br;                        // its query tile
        const bool forwards = walks_forwards(tile.bh);
        return {.i = forwards ? first : q_tiles - 1,
                .step = forwards ? 1 : -1,
                .left = q_tiles - first};
    }

    // The part of a work tile in the dQ of query tile i. `forwards`: how its head walks.
    __device__ __forceinline__ DqPart dq_part(BackwardWorkTile tile, bool forwards, int i) const {
        const int last_query = (i + 1) * Br - 1;
        const int last_k_tile = min(k_tiles - 1, (last_query + shift) / Bc);
        return {.number = forwards ? last_k_tile - tile.k_tile : tile.k_tile, .last = last_k_tile};
    }

    // The sums of a head's query tiles follow one another, two for each, and so do the semaphores.
    // These are the indices of query tile 0's for consumer wg, 0 or 1. Query tile i's are 2·i
    // higher.
    __device__ __forceinline__ int first_sum(int bh, int wg) const {
        return (bh % sum_heads) * q_tiles * 2 + wg;
    }
    __device__ __forceinline__ int first_semaphore(int bh, int wg) const {
        return bh * q_tiles * 2 + wg;
    }
};

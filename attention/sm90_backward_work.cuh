// How flash_bf16_sm90's backward is cut into items of work, who takes them in which order, and
// where dQ's sum lies.
//
// dQ in a fixed order. The key tiles of a head add to a query tile's sum one after the other, and
// `turn` counts them. The first writes the sum. The last fetches it, adds its own part and writes
// dQ. Blocks take items by ticket, and an item waits only for lower tickets, which belong to blocks
// that run. (Its last tile waits for the next item's loads too, which need only the block's earlier
// tiles.) So nothing can deadlock, and only who takes which ticket varies.
//
// A head's key tiles walk forward, from the diagonal to the last query, and the last key tile
// begins. So each starts one query tile after the one that adds before it, and its turn has usually
// come. But the longest items would be the last. Groups run from the highest heads to the lowest.
// So the group that runs last, heads 0 to group − 1, walks back, from the last query to the
// diagonal, and ends with its shortest items.
//
// Where a group is one head, every third of the heads walks back, or every second. The key tiles of
// a head that walks forward can begin together and end one after the other. Of one that walks back
// they have to begin one after the other, and end together. So each fits behind the one before it.
#pragma once
#include <algorithm>

#include "attention/launch.h"

// A tile of keys of one head.
struct Item {
    int k_tile;  // −1: there are no more
    int bh;
};
// An item that walks over the query tiles that see it.
struct Work {
    int k_tile;
    int bh;
    int i;     // the next query tile
    int step;  // from one to the next
    int left;  // how many, with the next
};

template <int Br, int Bc>  // queries and keys of a tile
struct Order {
    int NH, heads, Tq, Tk, shift;  // heads = B·NH; query i sees keys j ≤ i + shift
    int q_tiles, k_tiles;
    bool masked;    // some query does not see some key
    int group;      // of heads that are worked on together
    int period;     // if group is 1: every period-th head walks back
    int sum_heads;  // so many heads' sums of dQ have room
    // sum_heads·q_tiles, or more, because a call with fewer queries must not need more
    size_t sums;

    explicit Order(const AttentionShape& s)
        : NH(s.NH), heads(s.B * s.NH), Tq(s.Tq), Tk(s.Tk), shift(s.shift()) {
        q_tiles = ceil_div(s.Tq, Br);
        k_tiles = ceil_div(s.Tk, Bc);
        masked = shift < s.Tk - 1;
        // Q, dO and the sum of dQ of a group's heads fill half of L2.
        const int group_tiles = (24 << 20) / (Br * s.HS * 8);
        const int most = 2048 / s.HS;
        group = std::clamp(group_tiles / q_tiles, 1, most);
        period = NH % 3 == 0 ? 3 : 2;
        // with 3 large heads the 4th waits: last key tiles are slow
        sum_heads = std::min(heads, std::max(6, 3 * group));
        sums = std::min<size_t>(std::min(heads, 3 * most) * size_t(q_tiles),
                                std::max(3 * group_tiles, 6 * q_tiles));
    }

    // The item of a ticket. Groups of heads go one after the other, from the last heads to the
    // first. Within a group all heads have one key tile, then all have the next.
    __device__ __forceinline__ Item item(int ticket) const {
        const int later = heads * k_tiles - 1 - ticket;  // tickets after this one
        if (later < 0)
            return {.k_tile = -1, .bh = -1};
        const int items_of_group = group * k_tiles;
        const int first = later / items_of_group * group;  // the group's first head
        const int size = min(group, heads - first);        // the last group may be smaller
        const int i = later % items_of_group;
        const int step = i / size;
        const int bh = first + i % size;
        return {.k_tile = walks_forward(bh) ? step : k_tiles - 1 - step, .bh = bh};
    }
    // A head's direction depends on its own number and the shape alone, because it decides in which
    // order dQ, dK and dV are added up. Without a mask all walk back.
    __device__ __forceinline__ bool walks_forward(int bh) const {
        return masked && (group == 1 ? bh % NH % period > 0 : bh >= group);
    }
    __device__ __forceinline__ Work work(Item item) const {
        const int first = max(0, item.k_tile * Bc - shift) / Br;
        const bool forward = walks_forward(item.bh);
        return {.k_tile = item.k_tile,
                .bh = item.bh,
                .i = forward ? first : q_tiles - 1,
                .step = forward ? 1 : -1,
                .left = q_tiles - first};
    }
    // The last key tile that query tile i sees.
    __device__ __forceinline__ int last_k_tile(int i) const {
        return min(k_tiles - 1, ((i + 1) * Br - 1 + shift) / Bc);
    }
    // Which sum and which turn are those of a head's first dQ, for each of two warpgroups. Query
    // tile i's are 2i further.
    __device__ __forceinline__ int sum_index(int bh, int wg) const {
        return bh % sum_heads * q_tiles * 2 + wg;
    }
    __host__ __device__ int turn_index(int bh, int wg) const { return bh * q_tiles * 2 + wg; }
};

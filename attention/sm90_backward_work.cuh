// How flash_bf16_sm90's backward is cut into items of work, who takes them in which order, and where dQ's sum lies.
//
// dQ in a fixed order. The key tiles of a head add to a query tile's sum one after the other, and `turn` counts them.
// The first writes the sum. The last fetches it, adds its own part, rounds it and writes dQ. Blocks take items by
// ticket, and an item waits only for lower tickets, which belong to blocks that run. So nothing can deadlock, and only
// who takes which ticket varies from run to run.
//
// A head's key tiles walk forward, from the diagonal to the last query, and the last key tile begins. So each is one
// query tile behind the next one and finds its turn come. But the longest items would be the last. The last group of
// heads therefore walks back, from the last query to the diagonal, and ends with its shortest items.
//
// Where a group is one head, every third of the model's heads walks back, or every second. The key tiles of a head that
// walks forward can begin together and end one after the other. Of one that walks back they have to begin one after the
// other, and end together. So each fits behind the one before it. A call with some of a model's heads ends well, too,
// if its first head walks back, which is worked on last.
#pragma once
#include <algorithm>

#include "attention/launch.h"
#include "layers/gpu/tensor_map.h"

constexpr int kConsumers = 256, kThreads = 128 + kConsumers;

// What lies where in shared memory: panels of 64 columns, rows of 128 bytes in TMA's 128-byte swizzle.
template <int HS>
struct Tiles {
    static constexpr int Br = HS == 64 ? 128 : 64;  // queries; at HS 128 dK and dV take twice the registers
    static constexpr int Bc = 128;                  // keys, 64 a warpgroup
    static constexpr int KvBytes = Bc * HS * 2, QBytes = Br * HS * 2, DsBytes = Bc * Br * 2, DqBytes = Br * HS * 4,
                         LseDBytes = Br * 8;
    // K, Q, dO, dS, lse and D have two stages, V and dQ one. dK leaves from K's place, dV from dS's.
    static constexpr int K = 0, V = K + 2 * KvBytes, Q = V + KvBytes, Do = Q + 2 * QBytes, Ds = Do + 2 * QBytes,
                         Dq = Ds + 2 * DsBytes, LseD = Dq + DqBytes, Control = LseD + 2 * LseDBytes;
    static constexpr int Smem = Control + 24 * 8 + 2 * 8;  // mbarriers, items
    static_assert(Smem <= 227 * 1024);
};

struct Args {
    CUtensorMap q, k, v, dout, dq, dk, dv;  // dq, dk, dv: whole form, written
    float *dk_acc, *dv_acc;                 // partial form: added into or written
    int NH, heads, Tq, Tk;                  // heads = B·NH; Tq with the `before` that are not the block's
    int before, q_rows, k_rows;             // rows of lse and D, and of dk_acc and dv_acc: see PartialShape
    bool write_dkv;
    int shift;  // query i sees keys j ≤ i + shift: q_offset − k_offset − before, or Tk − before if not causal
    int q_tiles, k_tiles;
    int group;                // of heads that are worked on together: see item_of
    int back;                 // the first so many heads walk back, if a group has several
    int first_head, period;   // if it has one: the call's first head of the model's, and backward_period()
    bool masked;              // some query does not see some key
    int sum_heads;            // heads that dq_sum has room for, in the partial form all
    float scale, scale_log2;  // scale_log2 = scale·log2(e): the exponentials are powers of 2
    float* lse_D;             // (heads, q_tiles, 2, Br): log2(e)·lse (+inf for a row that sees no key) and D
    float* dq_sum;            // (sum_heads, sum_tiles, 2 warpgroups, 8 tiles of 8 columns, 128 threads, 4): unscaled dQ
    int sum_tiles;            // query tiles of a head in dq_sum, which points to the first of the block's
    int* turn;                // (heads, q_tiles, 2 warpgroups): how many key tiles have added to dQ
    int* ticket;              // the next item
};

// Groups of heads go one after the other, from the last heads to the first. Within a group all heads have one key tile,
// then all have the next. A head's direction depends on its place in the model and the batch alone, because it decides
// in which order dQ, dK and dV are added up. Without a mask all walk back.
__device__ __forceinline__ bool walks_forward(const Args& args, int bh) {
    return args.masked && (args.group == 1 ? (args.first_head + bh % args.NH) % args.period > 0 : bh >= args.back);
}
// The item of a ticket, {key tile, head}, or {−1, −1} if there are no more.
__device__ __forceinline__ int2 item_of(const Args& args, int ticket) {
    const int left = args.heads * args.k_tiles - 1 - ticket;  // tickets after this one
    if (left < 0) return {-1, -1};
    const int of_group = args.group * args.k_tiles, first = left / of_group * args.group;
    const int size = min(args.group, args.heads - first), step = left % of_group / size;
    const int bh = first + left % of_group % size;
    return {walks_forward(args, bh) ? step : args.k_tiles - 1 - step, bh};
}

// An item, and the next of its `left` query tiles.
struct Work {
    int k_tile, bh, i, step, left;
};
template <int HS>
__device__ __forceinline__ Work work_of(const Args& args, int k_tile, int bh) {
    // Keys that no query sees get the last tile, where all is hidden, and so zeros.
    const int first = min(max(0, k_tile * Tiles<HS>::Bc - args.shift) / Tiles<HS>::Br, args.q_tiles - 1);
    const bool forward = walks_forward(args, bh);
    return {k_tile, bh, forward ? first : args.q_tiles - 1, forward ? 1 : -1, args.q_tiles - first};
}
// The last key tile that walks past query tile i.
template <int HS>
__device__ __forceinline__ int last_k_tile(const Args& args, int i) {
    constexpr int Br = Tiles<HS>::Br, Bc = Tiles<HS>::Bc;
    return i == args.q_tiles - 1 ? args.k_tiles - 1 : min(args.k_tiles - 1, ((i + 1) * Br - 1 + args.shift) / Bc);
}

// Of a warpgroup's part of query tile i: the sum of dQ, and how many key tiles have added to it.
template <int HS>
__device__ __forceinline__ float* sum_of(const Args& args, int bh, int i, int wg) {
    return args.dq_sum +
           ((static_cast<size_t>(bh % args.sum_heads) * args.sum_tiles + i) * 2 + wg) * (Tiles<HS>::DqBytes / 8);
}
__device__ __forceinline__ int* turn_of(const Args& args, int bh, int i, int wg) {
    return args.turn + (static_cast<size_t>(bh) * args.q_tiles + i) * 2 + wg;
}

// How a launch goes about it, and its scratch: lse and D, dQ's sum (whole form), turns, ticket.
struct Layout {
    int Br, before, q_tiles, k_tiles, group, sum_heads;
    bool masked;
    size_t dq_sum, turn, ticket, bytes;
    static int rows_of_tile(int HS) { return HS == 64 ? Tiles<64>::Br : Tiles<128>::Br; }
    Layout(const PartialShape& s, bool block) {
        Br = rows_of_tile(s.HS), before = block ? s.q_begin % Br : 0;
        q_tiles = ceil_div(before + s.Tq, Br), k_tiles = ceil_div(s.Tk, Tiles<64>::Bc);
        const int heads = s.B * s.NH;
        masked = s.causal && s.q_offset - s.k_offset < s.Tk - 1;
        // Q, dO and the sum of dQ of a group's heads fill half of L2. Without a mask the key tiles of a head begin at
        // the same query and queue, so there a group has more heads.
        const size_t head_bytes = static_cast<size_t>(q_tiles) * Br * s.HS * 8, group_bytes = (masked ? 24 : 72) << 20;
        group = std::clamp(static_cast<int>(group_bytes / head_bytes), 1, (masked ? 2048 : 4096) / s.HS);
        sum_heads = block ? heads : std::min(heads, 3 * group);
        const size_t tiles = static_cast<size_t>(heads) * q_tiles;
        dq_sum = tiles * Br * sizeof(float2);
        turn = dq_sum + (block ? 0 : static_cast<size_t>(sum_heads) * q_tiles * Br * s.HS * sizeof(float));
        ticket = turn + 2 * tiles * sizeof(int);
        bytes = ticket + sizeof(int);
    }
};

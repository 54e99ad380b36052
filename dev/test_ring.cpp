// Tests ring attention on the CPU. It checks which rank has which part of the sequence, how partial results merge, and
// the partial form against the whole. The ring itself runs over processes and is compared with attention that was never
// split, in fp64.
//
// Run: ./dev/test_ring [part of a test's name]
#include <algorithm>
#include <limits>
#include <random>
#include <set>

#include "dev/ranks.h"
#include "dev/ring_check.h"
#include "layers/comm/reference_comm.h"

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The check on every rank of a job.
template <class X>
void check_job(int ranks, const AttentionShape& s, double q_sigma = 1) {
    run_ranks(ranks, [=](Job& job) {
        const Cpu cpu(1);
        CpuComm comm(cpu, job);
        check_ring<X>(cpu, comm, job, s, q_sigma);
        job.leave();
    });
}

}  // namespace

TEST(zigzag_divides_the_sequence) {
    for (int N : {1, 2, 3, 4, 8, 16}) {
        const Zigzag zigzag{N};
        std::set<int> chunks;
        std::set<std::pair<int, int>> met;  // ranks and whose keys they had
        int pairs = 0;
        for (int r = 0; r < N; r++) {
            for (int half : {0, 1}) {
                const int chunk = zigzag.chunk(r, half);
                CHECK(zigzag.owner(chunk) == r && chunk >= 0 && chunk < 2 * N && chunks.insert(chunk).second);
            }
            int added = 1;  // chunks of rank r's keys that have gradients yet, on their way to ranks r + 1, r + 2, …
            for (int step = 0; step < N; step++) {
                const int source = zigzag.source(r, step), at = (r + step) % N;
                CHECK(source >= 0 && source < N && met.insert({r, source}).second && (step > 0 || source == r));
                // The keys that a rank has at a step are those that the rank before it had one step earlier.
                if (step > 0) CHECK(zigzag.source((r + N - 1) % N, step - 1) == source);
                int work = 0, seen = 0;
                for (int k : {0, 1}) {
                    for (int q : {0, 1}) work += Zigzag::sees(zigzag.chunk(r, q), zigzag.chunk(source, k));
                    seen += Zigzag::sees(std::max(zigzag.chunk(at, 0), zigzag.chunk(at, 1)), zigzag.chunk(r, k));
                }
                CHECK(work == (step == 0 ? 3 : 2));  // the same on every rank. Two of the three are half masked
                pairs += work;
                if (step == 0) continue;
                added = std::max(added, seen);
                CHECK(zigzag.seen(at, step) == seen && seen == added);
            }
        }
        CHECK(pairs == N * (2 * N + 1));  // all that a causal mask leaves, once
    }
}

TEST(merge_of_partial_results) {
    const auto merged = [](double o, double lse, double o_b, double lse_b) {
        std::vector<double> result = {o, lse};
        attention_merge(&result[0], &result[1], &o_b, lse_b, 1);
        return result;
    };
    for (double x : {-3.0, 0.0, 2.5})
        for (double y : {-1.0, 0.5, 4.0}) {
            const double l = std::exp(x), l_b = std::exp(y);
            const std::vector<double> r = merged(7, x, -2, y);
            CHECK_NEAR(r[0], (7 * l - 2 * l_b) / (l + l_b), 1e-14);
            CHECK_NEAR(r[1], std::log(l + l_b), 1e-14);
        }
    CHECK((merged(7, -kInf, -2, 3) == std::vector<double>{-2, 3}));        // the first keys of a row
    CHECK((merged(7, 3, NAN, -kInf) == std::vector<double>{7, 3}));        // no keys
    CHECK((merged(0, -kInf, 0, -kInf) == std::vector<double>{0, -kInf}));  // none at all
    for (double far : {800.0, 1e5, 1e300}) {                               // exp of it is infinite
        CHECK((merged(7, far, -2, -far) == std::vector<double>{7, far}));
        CHECK((merged(7, -far, -2, far) == std::vector<double>{-2, far}));
    }
    CHECK(std::isnan(merged(7, 1, NAN, 1)[0]) && std::isnan(merged(7, 1, 2, NAN)[0]));  // a NaN stays
    float o = 7;
    double lse = 90;
    const float o_b = -2;
    attention_merge(&o, &lse, &o_b, -90., 1);  // exp(180) is infinite in fp32
    CHECK(o == 7 && lse == 90);

    // Merging works in any order, and only fp32's rounding differs.
    std::mt19937 rng(5);
    std::normal_distribution<double> distribution(0, 20);
    for (int trial = 0; trial < 100; trial++) {
        std::vector<std::pair<double, double>> parts;
        for (int i = 0; i < 8; i++) parts.push_back({distribution(rng), float(distribution(rng))});
        double l = 0, sum = 0;
        for (const auto& [value, L] : parts) l += std::exp(L), sum += std::exp(L) * value;
        std::shuffle(parts.begin(), parts.end(), rng);
        float o32 = 0;
        double running = -kInf;
        for (const auto& [value, L] : parts) {
            const float o_b32 = float(value);
            attention_merge(&o32, &running, &o_b32, L, 1);
        }
        CHECK_NEAR(o32, sum / l, 1e-4);
        CHECK_NEAR(running, std::log(l), 1e-12);
    }
}

// Blocks of queries, or all at once, against blocks of keys, later keys first. The mask hides some of them whole.
TEST(blocks_make_the_whole) {
    const int B = 2, T = 37, NH = 3, HS = 16, C = NH * HS, n = B * T * C;
    const long long far = 1LL << 40;
    const Whole<double> whole({B, T, NH, HS, true, 0.3f}, 4);
    const Written& want = whole.want;
    const Cpu cpu(1);
    const auto heads = [&](const std::vector<double>& x, int begin, int part, int parts) {
        return Heads<const double>{&x[(begin * parts + part) * C], size_t(T) * parts * C, size_t(parts) * C};
    };
    const std::vector<int> cuts = {0, 5, 6, 20, T};
    for (const std::vector<int>& q_cuts : {cuts, {0, T}}) {
        std::vector<double> out(n, NAN), lse(n / HS, NAN), D(n / HS, NAN), dq_sum(n), dk(n), dv(n), dqkv(3 * n, NAN);
        attention_clear_state(cpu, out.data(), lse.data(), {B, T, 1, NH, HS});
        attention_D(cpu, D.data(), whole.dout.data(), want.out.data(), B, T, NH, HS);
        for (size_t i = 0; i + 1 < q_cuts.size(); i++)
            for (size_t j = cuts.size() - 1; j-- > 0;) {
                const int q0 = q_cuts[i], Tq = q_cuts[i + 1] - q0, k0 = cuts[j], Tk = cuts[j + 1] - k0;
                PartialShape s{B, Tq, Tk, NH, HS, q0 + far, k0 + far, true, 0.3f, Tq == T ? 0 : T, T};
                const auto q = heads(whole.qkv, q0, 0, 3), k = heads(whole.qkv, k0, 1, 3),
                           v = heads(whole.qkv, k0, 2, 3), dout = heads(whole.dout, q0, 0, 1);
                attention_forward_partial<double>(cpu, &out[q0 * C], &lse[q0], q, k, v, s);
                if (k0 >= q0 + Tq) CHECK(lse[q0] == -kInf && out[q0 * C] == 0);  // nothing seen yet
                s.q_begin = q0;
                attention_backward_partial<double>(cpu, dq_sum.data(), &dk[k0 * C], &dv[k0 * C], nullptr, q, k, v, dout,
                                                   &want.lse[q0], &D[q0], s);
            }
        attention_write_dq<double>(cpu, {dqkv.data(), size_t(T) * 3 * C, 3 * C}, dq_sum.data(), {B, T, T, NH, HS});
        copy_rows(cpu, &dqkv[C], 3 * C, dk.data(), C, C, B * T);
        copy_rows(cpu, &dqkv[2 * C], 3 * C, dv.data(), C, C, B * T);
        check_close("lse", lse, want.lse, 5e-15);
        check_close("out", out, want.out, 5e-15);
        check_close("dqkv", dqkv, want.dqkv, 1e-13);
    }
}

TEST(too_large_a_head_is_refused) {
    const std::vector<double> x(257);
    std::vector<double> o(257), lse(1);
    const Heads<const double> heads = {x.data(), 257, 257};
    CHECK_ERROR(attention_forward_partial<double>(Cpu(1), o.data(), lse.data(), heads, heads, heads, {1, 1, 1, 1, 257}),
                "head size 257");
}

// The scale is not 1/√HS, here and below.
TEST(chunks_make_the_whole) {
    const Cpu cpu(1);
    const AttentionShape s{2, 37, 3, 16, true, 0.4f};
    for (const auto& [q_chunk, k_chunk] : {std::pair{37, 37}, {8, 8}, {5, 16}, {100, 1}, {1, 100}, {36, 2}})
        check_chunks<double>(cpu, s, q_chunk, k_chunk);
    check_chunks<double>(cpu, {1, 37, 1, 16, false}, 8, 5);
    check_chunks<float>(cpu, s, 7, 10);
}

// The ring runs over processes.
TEST(ring_equals_the_whole) {
    for (int ranks : {1, 2, 3, 4})
        for (int Tc : {1, 7, 16}) check_job<double>(ranks, {2, 2 * ranks * Tc, 2, 32, true, 0.3f});
    check_job<double>(3, {1, 36, 2, 16});
    check_job<double>(4, {1, 40, 1, 64}, 40);  // one key has nearly all the weight
    check_job<float>(4, {1, 264, 2, 64}, 5);
}

// The exchange of heads has the bits of one call, over processes and with threads as ranks. (2, 18) are three cohorts and
// (2, 20) five, so memory is used again while results travel.
TEST(exchanged_heads_are_bit_identical) {
    for (int ranks : {1, 2, 3, 4})
        run_ranks(ranks, [=](Job& job) {
            const Cpu cpu(1);
            CpuComm comm(cpu, job);
            const Whole<float> whole({2, 2 * ranks * 7, 2 * ranks, 16}, 1, 1, kBitsOnly);
            check_exchange(cpu, comm, whole, unchunked(cpu, whole));
            job.leave();
        });
    for (const auto& [ranks, NH] : {std::pair{1, 1}, {2, 6}, {2, 12}, {2, 18}, {2, 20}, {3, 15}, {8, 8}})
        check_local_exchange<double>(Cpu(1), {1, 2 * ranks * 5, NH, 64}, ranks);
}

// The ring's studies and its benchmark judge by this.
TEST(worst_keeps_nan) {
    double worst = 0;
    for (double x : {0.5, 2.0, 1.0}) keep_worst(worst, x);
    CHECK(worst == 2);
    for (double x : {double(NAN), 3.0, 0.0}) keep_worst(worst, x);
    CHECK(std::isnan(worst));
}

TEST(ring_errors_do_not_grow) {
    check_flat<float>(Cpu(1), {1, 256, 2, 32, true, 0.02f}, 1);  // with long sums one key's error does not decide
}

TEST_MAIN

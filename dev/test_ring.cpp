// Tests attention in pieces on the CPU. It checks which rank has which part of the sequence, how results merge, and
// chunks and rings against attention that was never split, in fp64. The ranks of a ring are threads.
//
// Run: ./dev/test_ring [part of a test's name]
#include <algorithm>
#include <random>
#include <set>

#include "dev/ring_check.h"

namespace {

// o, lse and lse's rest after a merge of two rows.
template <class A = double>
std::array<A, 3> merged(A o, A lse, A o_b, A lse_b, A rest = 0, A rest_b = 0) {
    const Piece<A> sum{{&o, 1, 1}, {&lse, 1}, {&rest, 1}}, piece{{&o_b, 1, 1}, {&lse_b, 1}, {&rest_b, 1}};
    merge(Cpu(1), {1, 1, 1, 1, 1}, sum.o, sum, piece);
    return {o, lse, rest};
}

}  // namespace

// Every rank has the same work. What it sees of another rank's keys is both chunks or the early one.
TEST(zigzag_divides_the_sequence) {
    for (int N : {1, 2, 3, 4, 8, 16}) {
        const Zigzag zigzag{N};
        std::set<int> chunks;
        for (int rank = 0; rank < N; rank++) {
            for (int late : {0, 1}) chunks.insert(zigzag.chunk(rank, late));
            for (int step = 0; step < N; step++) {
                const int source = zigzag.source(rank, step);
                CHECK(source == (rank + N - step) % N);
                int seen[2] = {0, 0};  // by the early and the late queries
                for (int q : {0, 1})
                    for (int k : {0, 1}) seen[q] += zigzag.chunk(source, k) <= zigzag.chunk(rank, q);
                CHECK(seen[0] + seen[1] == (step == 0 ? 3 : 2));  // two of the three are half masked
                if (step > 0) CHECK(zigzag.seen(rank, step) == seen[1]);
            }
        }
        CHECK(chunks.size() == size_t(2 * N) && *chunks.begin() == 0 && *chunks.rbegin() == 2 * N - 1);
    }
}

TEST(merge_of_two_pieces) {
    for (double x : {-3.0, 0.0, 2.5})
        for (double y : {-1.0, 0.5, 4.0}) {
            const double l = std::exp(x), l_b = std::exp(y);
            const auto [o, lse, rest] = merged(7., x - 1, -2., y + 2, 1., -2.);  // the rests count
            CHECK_NEAR(o, (7 * l - 2 * l_b) / (l + l_b), 1e-14);
            CHECK_NEAR(lse + rest, std::log(l + l_b), 1e-14);
            const auto [o32, lse32, rest32] = merged<float>(7, x, -2, y);
            CHECK_NEAR(o32, (7 * l - 2 * l_b) / (l + l_b), 1e-6);
            CHECK_NEAR(double(lse32) + rest32, std::log(l + l_b), 1e-7);
            CHECK(lse32 == float(double(lse32) + rest32));
        }
    for (double far : {800.0, 1e5, 1e300}) {  // exp of it is infinite
        CHECK((merged(7., far, -2., -far) == std::array{7., far, 0.}));
        CHECK((merged(7., -far, -2., far) == std::array{-2., far, 0.}));
    }
    CHECK((merged(7.f, 90.f, -2.f, -90.f) == std::array{7.f, 90.f, 0.f}));
    CHECK(std::isnan(merged<double>(7, 1, NAN, 1)[0]) && std::isnan(merged<double>(NAN, 1, 2, 1)[0]));  // a NaN stays
    for (const auto& r : {merged<double>(7, 1, 2, NAN), merged<double>(7, NAN, 2, 1)})
        CHECK(std::isnan(r[0]) && std::isnan(r[1]));
}

// Merging works in any order, and only fp32's rounding differs.
TEST(merge_of_many_pieces) {
    std::mt19937 rng(5);
    std::normal_distribution<double> distribution(0, 20);
    for (int trial = 0; trial < 100; trial++) {
        std::vector<std::pair<float, float>> pieces;
        double l = 0, sum = 0;
        for (int i = 0; i < 8; i++) {
            const auto& [value, L] = pieces.emplace_back(distribution(rng), distribution(rng));
            l += std::exp(double(L));
            sum += std::exp(double(L)) * value;
        }
        std::shuffle(pieces.begin(), pieces.end(), rng);
        std::array<float, 3> all{pieces[0].first, pieces[0].second, 0};
        for (int i = 1; i < 8; i++) all = merged(all[0], all[1], pieces[i].first, pieces[i].second, all[2], 0.f);
        CHECK_NEAR(all[0], sum / l, 1e-5);
        CHECK_NEAR(double(all[1]) + all[2], std::log(l), 5e-7);
    }
}

// The scale is not 1/√HS, here and below.
TEST(chunks_make_the_whole) {
    const Cpu cpu(1);
    const AttentionShape s{2, 37, 37, 3, 16, true, 0.4f};
    const Whole<double, Cpu> whole(cpu, s, 4), unmasked(cpu, {1, 37, 37, 1, 16, false});
    for (const auto& [q_chunk, k_chunk] : {std::pair{37, 37}, {8, 8}, {5, 16}, {100, 1}, {1, 100}, {36, 2}, {9, 13}}) {
        check_chunks(whole, q_chunk, k_chunk);
        check_chunks(unmasked, q_chunk, k_chunk);
    }
    check_chunks(Whole<float, Cpu>(cpu, s), 7, 10);
}

// Over 1, 2, 3, 4 and 8 ranks, where they divide T.
TEST(ring_equals_the_whole) {
    const Cpu cpu(1);
    for (int T : {6, 8, 24, 42, 56, 128}) check_local_rings<double>(cpu, {2, T, T, 2, 32, true, 0.3f}, 1, 1);
    check_local_rings<double>(cpu, {2, 144, 144, 2, 20}, 1, 1);
    check_local_rings<double>(cpu, {1, 40, 40, 1, 64}, 40, 1);  // one key has nearly all the weight
    check_local_rings<float>(cpu, {1, 264, 264, 2, 64}, 5, 1);
}
TEST(ring_errors_do_not_grow) {
    // With long sums one key's error does not decide.
    check_local_rings<float>(Cpu(1), {1, 256, 256, 2, 32, true, 0.02f}, 1, 1, 5);
}

TEST_MAIN

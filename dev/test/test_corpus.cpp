// The built-in corpus: is its grammar read rightly, is its floor exact, is its text always the
// same?
#include <cctype>
#include <future>
#include <map>
#include <unordered_set>

#include "data/corpus.h"
#include "data/file.h"
#include "data/grammar.h"
#include "data/tokenizer.h"
#include "dev/test/program.h"

namespace {

// All texts are compared in lower case. Choices must differ without the help of capitals.
std::string lower(std::string s) {
    for (char& c : s)
        c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return s;
}

// Finds every derivation of a text: what each choice may have been, and −log of all choices'
// probability. It backtracks: what is read from offset `at` of the text may end in several places,
// and `then` is called with each of them, to read all that follows.
struct Search {
    const Grammar& g;
    const std::string text;
    std::vector<double> nats = {};  // of each derivation

    // For each variable the alternative that was chosen, and its text.
    using Memory = std::map<int, std::pair<const Alternative*, std::string>>;
    // `spent` is the nats of the choices so far.
    using Then = std::function<void(size_t at, const Memory&, double spent)>;

    Search(const Grammar& g, const std::string& text) : g(g), text(lower(text)) {
        const auto end = [&](size_t at, const Memory&, double spent) {
            if (at == this->text.size())
                nats.push_back(spent);
        };
        read({{.kind = Symbol::choose, .rule = g.rule("story")}}, 0, 0, {}, 0, end);
    }

    // Reads symbol i of t and all after it.
    void read(const Template& t, size_t i, size_t at, const Memory& memory, double spent,
              const Then& then) {
        if (i == t.size())
            return then(at, memory, spent);

        const Symbol& s = t[i];
        const Then rest = [&](size_t at, const Memory& memory, double spent) {
            read(t, i + 1, at, memory, spent, then);
        };
        if (s.article)
            at += text[at] == 'n' ? 2 : 1;  // the "a" before it goes on with "n " or " "

        if (s.kind == Symbol::text)
            read_literal(s.literal, at, memory, spent, rest);
        else if (s.kind == Symbol::repeat)
            read_literal(memory.at(s.variable).second, at, memory, spent, rest);
        else if (s.kind == Symbol::recall)
            read(memory.at(s.variable).first->columns[s.column], 0, at, memory, spent, rest);
        else
            read_choice(s, at, memory, spent, rest);
    }

    void read_literal(const std::string& literal, size_t at, const Memory& memory, double spent,
                      const Then& then) const {
        if (text.compare(at, literal.size(), literal) == 0)
            then(at + literal.size(), memory, spent);
    }

    // Tries each alternative of a rule, except those that other variables have taken.
    void read_choice(const Symbol& s, size_t at, const Memory& memory, double spent,
                     const Then& then) {
        const std::vector<Alternative>& alternatives = g.rules[s.rule].alternatives;
        const auto weight = [&](const Alternative& a) {
            for (const int other : s.others)
                if (memory.at(other).first == &a)
                    return 0.0;
            return static_cast<double>(a.weight);
        };
        double total = 0;
        for (const Alternative& a : alternatives)
            total += weight(a);

        for (const Alternative& a : alternatives) {
            if (weight(a) == 0)
                continue;
            const Then remember = [&](size_t end, const Memory& memory, double spent) {
                Memory more = memory;
                more[s.variable] = {&a, text.substr(at, end - at)};
                then(end, more, spent);
            };
            read(a.columns[s.column], 0, at, memory, spent - std::log(weight(a) / total),
                 s.variable < 0 ? then : remember);
        }
    }
};

}  // namespace

// All of the notation but comments and {x:table.column}, which data/stories.txt has. Each text
// comes as often as its choices say, and three probabilities are calculated by hand.
TEST(notation_and_probabilities) {
    const std::string source = R"(
@rule story
3 {hero:person} ate a {fruit}. {Hero.he} [25% never ](slept|sang).
1 {hero:person} met {friend:person!hero} ¶
  and {friend} met {hero.him}. {Fruit}!
@table person: name, he, him
Ann / Eve | she | her
Tom | he | him
@list fruit
apple, pear(|, cut)
)";
    const Grammar g(source);
    const Grammar small(lower(source));
    std::map<std::string, int> count;
    const int n = 50000;
    for (int i = 0; i < n; i++)
        count[g.write(g.rule("story"), 1, i)]++;
    std::map<std::string, double> probability;
    for (const auto& [text, times] : count) {
        const std::vector<double> nats = Search(small, text).nats;
        CHECK(nats.size() == 1);
        const double p = std::exp(-nats.at(0));
        CHECK_NEAR(times, n * p, 5 * std::sqrt(n * p));
        probability[text] = p;
    }
    CHECK_NEAR(probability["Eve ate an apple. She never sang."], 0.75 / 3 / 2 * 0.25 / 2, 1e-12);
    CHECK_NEAR(probability["Tom ate a pear. He slept."], 0.75 / 3 / 2 / 2 * 0.75 / 2, 1e-12);
    CHECK_NEAR(probability["Ann met Tom\nand Tom met her. Pear, cut!"], 0.25 / 3 / 2 / 2 / 2,
               1e-12);
}

// A capital where a row is chosen and remembered is only for the text, as it is anywhere else.
TEST(a_capital_can_bind_a_name) {
    const Grammar g(R"(
@rule story
1 {Hero:person} met {friend:person!hero}, and {friend} met {hero}.
@list person
ann, tom
)");
    for (int i = 0; i < 20; i++) {
        const std::string text = g.write(g.rule("story"), 1, i);
        CHECK(text == "Ann met tom, and tom met ann." || text == "Tom met ann, and ann met tom.");
    }
}

// A choice among the other rows needs one. Which rows are left may depend on the choices before.
TEST(a_choice_without_rows_is_refused) {
    const Grammar g(R"(
@rule single
1 {a:one} and {b:one!a}
@list one
ann
@rule pair
1 {c:two}, {d:two!c} and {e:two!c!d}
@list two
ann, tom
)");
    CHECK_ERROR(g.write(g.rule("single"), 1, 0), "grammar: !a leaves no row of one");
    CHECK_ERROR(g.write(g.rule("pair"), 1, 0), "grammar: !c!d leaves no row of two");
}

namespace {

// The stories of the corpus by number: first the validation part, then the training part.
constexpr int kValStories = 1100;
constexpr int kAllStories = 32100;

std::vector<uint16_t> tokens_of(const std::string& story) {
    std::vector<uint16_t> tokens = {kEndOfText};
    for (const int byte : encode_bytes(story))
        tokens.push_back(static_cast<uint16_t>(byte));
    return tokens;
}

}  // namespace

TEST(the_corpus_is_made_once) {
    auto other = std::async(std::launch::async, [] { return &builtin_corpus(); });
    const Corpus* const corpus = &builtin_corpus();
    CHECK(other.get() == corpus);
}

// No story comes twice, so that none is in both parts.
TEST(the_corpus_has_every_story_once) {
    std::unordered_set<std::string> seen;
    std::vector<uint16_t> val;
    std::vector<uint16_t> train;
    for (int number = 0; number < kAllStories; number++) {
        const std::string story = write_story(1, number);
        CHECK(seen.insert(story).second);
        CHECK(story.find_first_of("{}()[]|") == std::string::npos);
        CHECK(story.find("  ") == std::string::npos);

        std::vector<uint16_t>& part = number < kValStories ? val : train;
        const std::vector<uint16_t> tokens = tokens_of(story);
        part.insert(part.end(), tokens.begin(), tokens.end());
    }
    CHECK(builtin_corpus().val == val);
    CHECK(builtin_corpus().train == train);
}

// The floor is exact if each story has one derivation. The grammar is read from the file itself,
// because an object with an old copy of it writes stories that this grammar cannot.
TEST(the_floor_is_exact) {
    const Corpus& corpus = builtin_corpus();
    const Grammar stories(lower(read_file("data/stories.txt")));
    double nats = 0;
    for (int number = 0; number < kValStories; number++) {
        const Search search(stories, write_story(1, number));
        CHECK(search.nats.size() == 1);
        nats += search.nats.empty() ? NAN : search.nats[0];
    }
    CHECK_NEAR(corpus.val_nats, nats / static_cast<double>(corpus.val.size()), 1e-12);
}

// The checksums are those of shards with these tokens.
TEST(the_corpus_is_the_same_on_every_machine) {
    const auto checksum = [](const std::vector<uint16_t>& tokens) {
        const std::string shard = header_of({20240520, 1, int(tokens.size())}) + bytes_of(tokens);
        return checksum64(shard.data(), shard.size());
    };
    CHECK(checksum(builtin_corpus().val) == 0x8c77f048a27d775fu);
    CHECK(checksum(builtin_corpus().train) == 0x1fbde22c378e520du);
}

TEST_MAIN

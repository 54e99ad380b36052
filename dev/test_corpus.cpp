// The built-in corpus: is its grammar read rightly, its entropy exact, its text always the same, its cache safe?
// Run: ./dev/test_corpus
#include <cctype>
#include <deque>
#include <future>
#include <map>
#include <set>
#include <unordered_set>

#include "data/corpus.h"
#include "data/grammar.h"
#include "data/tokenizer.h"
#include "dev/program.h"

namespace {
namespace fs = std::filesystem;

bool is_letter(char c) {
    return std::isalnum(static_cast<unsigned char>(c));
}
// Choices are told without the help of capitals.
std::string lower(std::string s) {
    for (char& c : s) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return s;
}
// From the file itself: an object with an old copy of it writes stories that this grammar cannot. `joint` is what
// follows the "a" of an article.
const Grammar& stories() {
    static const Grammar g(lower(read_file("data/stories.txt")) + "\n@rule joint\n1  \n1 n \n");
    return g;
}

template <class F>
void for_each_symbol(const Grammar& g, F f) {
    for (size_t r = 0; r < g.rules.size(); r++)
        for (const Alternative& a : g.rules[r].alternatives)
            for (const Template& t : a.columns)
                for (size_t i = 0; i < t.size(); i++) f(static_cast<int>(r), t, i);
}

// What is still to be written: a letter or a choice, and then `next`.
struct Rest {
    char letter;
    const Symbol* choice;
    const Rest* next;
    const Alternative* row = nullptr;  // if set, `choice` fell on this row, and its text, which began at `start`, ends
    size_t start = 0;
};
struct Search {
    const Grammar& g;
    bool words = false;             // in clash(): no letter follows a text, so "sea" does not begin "seal"
    std::string common = {};        // what the texts that clash have in common
    std::vector<double> nats = {};  // of each derivation that read() found
    const Symbol joint = {Symbol::choose, "", g.rule("joint")};
    std::deque<Rest> rests = {};

    const Rest* push(const Template& t, const Rest* next, size_t from = 0) {
        for (size_t i = t.size(); i-- > from;) {
            if (t[i].kind != Symbol::text) next = &rests.emplace_back(Rest{0, &t[i], next});
            if (t[i].article) next = &rests.emplace_back(Rest{0, &joint, next});
            for (size_t c = t[i].literal.size(); c-- > 0;)
                next = &rests.emplace_back(Rest{t[i].literal[c], nullptr, next});
        }
        return next;
    }
    // Can one write a text that begins a text of the other? It takes a remembered row to be any row of its table, so
    // "yes" is a suspicion and "no" a proof.
    bool clash(const Rest* a, const Rest* b, const std::string& before) {
        common = before;
        if (a == b) return true;
        if (!a || (b && b->choice)) std::swap(a, b);
        if (!a->choice) {
            if (!b) return !(words && !before.empty() && is_letter(before.back()) && is_letter(a->letter));
            return a->letter == b->letter && clash(a->next, b->next, before + a->letter);
        }
        const Symbol &x = *a->choice, &y = b && b->choice ? *b->choice : Symbol{Symbol::text};
        // The same choice on both sides falls alike, or the texts differ there because its own rule is proved.
        if (x.kind == y.kind && x.rule == y.rule && x.column == y.column && x.variable == y.variable)
            return clash(a->next, b->next, before + "{" + g.rules[x.rule].name + "}");
        for (const Alternative& one : g.rules[x.rule].alternatives)
            if (clash(push(one.columns[x.column], a->next), b, before)) return true;
        return false;
    }
    // Finds every derivation of `text` from `at` on.
    using Memory = std::map<int, std::pair<const Alternative*, std::string>>;
    void read(const std::string& text, size_t at, const Rest* todo, Memory memory, double spent) {
        for (; todo && (todo->letter || todo->row); todo = todo->next)
            if (todo->row) memory[todo->choice->variable] = {todo->row, text.substr(todo->start, at - todo->start)};
            else if (text[at++] != todo->letter) return;
        if (!todo && at == text.size()) nats.push_back(spent);
        if (!todo) return;
        const Symbol& s = *todo->choice;
        if (s.kind == Symbol::again) todo = push({{Symbol::text, memory.at(s.variable).second}}, todo->next);
        if (s.kind == Symbol::recall) todo = push(memory.at(s.variable).first->columns[s.column], todo->next);
        if (s.kind != Symbol::choose) return read(text, at, todo, memory, spent);
        std::set<const Alternative*> excluded;
        for (int other : s.others) excluded.insert(memory.at(other).first);
        uint64_t total = 0;
        for (const Alternative& a : g.rules[s.rule].alternatives) total += excluded.count(&a) ? 0 : a.weight;
        for (const Alternative& a : g.rules[s.rule].alternatives) {
            if (excluded.count(&a)) continue;
            const Rest* next = s.variable < 0 ? todo->next : &rests.emplace_back(Rest{0, &s, todo->next, &a, at});
            const double p = &s == &joint ? 1 : static_cast<double>(a.weight) / static_cast<double>(total);
            read(text, at, push(a.columns[s.column], next), memory, spent - std::log(p));
        }
    }
};

}  // namespace

// Every form of the notation. Each text comes as often as its nats say, and those are what the choices give by hand.
TEST(notation_and_probabilities) {
    const Grammar g(R"(
@rule story
3 {hero:person} ate a {fruit}. {Hero.he} [25% never ](slept|sang).
1 {hero:person} met {friend:person!hero} ¶
  and {friend} met {hero.him}. {Fruit}!
@table person: name, he, him
Ann / Eve | she | her
Tom | he | him
@list fruit
apple, pear(|, cut)
)");
    std::map<std::string, double> probability, count;
    const int n = 50000;
    for (int i = 0; i < n; i++) {
        double nats = 0;
        const std::string text = g.write(g.rule("story"), 1, i, nats);
        probability[text] = std::exp(-nats);
        count[text]++;
    }
    for (const auto& [text, p] : probability) CHECK_NEAR(count[text], n * p, 5 * std::sqrt(n * p));
    CHECK_NEAR(probability["Eve ate an apple. She never sang."], 0.75 / 3 / 2 * 0.25 / 2, 1e-12);
    CHECK_NEAR(probability["Tom ate a pear. He slept."], 0.75 / 3 / 2 / 2 * 0.75 / 2, 1e-12);
    CHECK_NEAR(probability["Ann met Tom\nand Tom met her. Pear, cut!"], 0.25 / 3 / 2 / 2 / 2, 1e-12);
}

TEST(errors_of_notation) {
    const std::pair<const char*, const char*> errors[] = {
        {"apple", "no header yet"}, {"@table t", "bad header"}, {"@list x\na\n@list x\nb", "second definition"},
        {"@rule s\n{x}", "no weight"}, {"@rule s\n1 {nothing}", "no rule nothing"}, {"@rule s\n1 {x", "bad slot"},
        {"@rule s\n1 (a|b", "no closing"}, {"@rule s\n1 [x% y]", "without its percentage"},
        {"@rule s\n1 a [10% x]", "an option after"}, {"@table t: a, b\nx | y | z", "number of columns"},
        {"@table t: a, b\nx | y\n@rule s\n1 {v:t} {v.c}", "no column c"},
        {"@list x\na\n@list y\nb\n@rule s\n1 {v:x} {v:y}", "bad binding"},
        {"@list x\na\n@rule s\n1 {v:x!w}", "no such variable"},
        {"@list x\na\n@list y\nb\n@rule s\n1 {v:x} {w:y!v}", "v remembers no row of it"},
    };
    for (const auto& [source, what] : errors) CHECK_ERROR(Grammar{source}, what);
    double nats = 0;
    CHECK_ERROR(Grammar("@list x\na\n@rule s\n1 {v} {v:x}").write(1, 1, 1, nats), "v is not chosen yet");
}

// A named rule is told by itself, a choice in place together with the rest of its template.
TEST(every_choice_is_readable_from_the_left) {
    const Grammar& g = stories();
    // Rules whose text a letter may follow. A rule passes this on to the rules that end it, one deeper each time.
    std::set<int> glued;
    for (int depth = 0; depth < 20; depth++)
        for_each_symbol(g, [&](int rule, const Template& t, size_t i) {
            const bool last = i + 1 == t.size();
            if (last ? glued.count(rule) > 0 : t[i + 1].kind != Symbol::text || is_letter(t[i + 1].literal[0]))
                glued.insert(t[i].rule);
        });
    std::set<std::pair<int, int>> proved;
    for_each_symbol(g, [&](int rule, const Template& t, size_t i) {
        const Symbol& s = t[i];
        if (s.kind != Symbol::choose) return;
        if (s.variable >= 0) CHECK(s.column == 0);  // clash() takes that for granted where the text comes again
        const bool named = !g.rules[s.rule].name.empty();
        if (named && !proved.insert({s.rule, s.column}).second) return;
        Search search{g, !glued.count(named ? s.rule : rule)};
        const Rest* rest = named ? nullptr : search.push(t, nullptr, i + 1);
        std::vector<const Rest*> all;
        for (const Alternative& a : g.rules[s.rule].alternatives) all.push_back(search.push(a.columns[s.column], rest));
        for (size_t x = 0; x < all.size(); x++)
            for (size_t y = 0; y < x; y++)
                if (search.clash(all[x], all[y], ""))
                    test::report(__FILE__, __LINE__, format("rule %s: alternatives %zu and %zu clash after \"%s\"",
                                 g.rules[named ? s.rule : rule].name.c_str(), y + 1, x + 1, search.common.c_str()));
    });
}

TEST(one_derivation_and_its_nats) {
    const Template root = {{Symbol::choose, "", stories().rule("story")}};
    for (uint64_t i = 0; i < 300; i++) {
        const Story story = write_story(1, i);
        Search search{stories()};
        search.read(lower(story.text), 0, search.push(root, nullptr), {}, 0);
        CHECK(search.nats.size() == 1);
        for (double nats : search.nats) CHECK_NEAR(nats, story.nats, 1e-9);
    }
}

TEST(corpus_on_disk) {
    const std::string dir = "build/test_corpus", about = dir + "/corpus.txt";
    fs::remove_all(dir);
    // Of two at once one writes and the other waits. Both would write to the same temporary files.
    auto other = std::async(std::launch::async, [&] { builtin_corpus(dir, true); });
    const Corpus corpus = builtin_corpus(dir, true);
    other.get();
    // The same bytes on every machine. If they change but the grammar does not, raise kFormat in corpus.cpp.
    const std::string text = read_file(about), val = read_file(corpus.val_path);
    for (const char* checksum : {"checksum 1fbde22c378e520d\nval", "checksum 8c77f048a27d775f\n"})
        if (!contains(text, checksum)) test::report(__FILE__, __LINE__, "other bytes: " + text);
    uint64_t number = 0;  // of a story
    std::unordered_set<std::string> seen;
    auto check = [&](const std::string& path, uint64_t tokens, double nats_per_token) {
        const std::string shard = read_file(path).substr(256 * sizeof(int32_t));
        std::vector<uint16_t> expected;
        double nats = 0;
        while (expected.size() * sizeof(uint16_t) < shard.size()) {
            const Story story = write_story(1, number++);
            expected.push_back(kEndOfText);
            for (int token : encode_bytes(story.text)) expected.push_back(static_cast<uint16_t>(token));
            nats += story.nats;
            CHECK(seen.insert(story.text).second);  // in one shard only, and once
            CHECK(story.text.find_first_of("{}()[]|") > story.text.size() && story.text.find("  ") > story.text.size());
        }
        CHECK(tokens == expected.size());
        CHECK(shard == std::string(reinterpret_cast<const char*>(expected.data()), 2 * expected.size()));
        CHECK_NEAR(nats_per_token, nats / static_cast<double>(tokens), 1e-12);
    };
    check(corpus.val_path, corpus.val_tokens, corpus.val_nats);
    check(corpus.train_path, corpus.train_tokens, corpus.train_nats);

    const auto time = fs::last_write_time(corpus.train_path);
    builtin_corpus(dir, true);
    CHECK(fs::last_write_time(corpus.train_path) == time);  // whole, so not made anew
    auto spoil = [&](const std::string& path, const std::string& with) {
        write_file(path, with);
        builtin_corpus(dir, true);
        CHECK(read_file(about) == text && read_file(corpus.val_path) == val);
    };
    spoil(corpus.val_path, val.substr(0, val.size() / 2));
    spoil(corpus.val_path, val.substr(0, val.size() - 1) + "x");
    write_file(corpus.val_path + ".tmp.9", "of a process that was killed");
    spoil(about, "version 0\n" + text.substr(text.find("seed")));
    CHECK(!fs::exists(corpus.val_path + ".tmp.9"));

    CHECK_ERROR(builtin_corpus(about + "/corpus", true), "corpus: cannot write the built-in corpus");
    CHECK_ERROR(builtin_corpus("/proc/nowhere", true), "your own data");
    fs::remove_all(dir);
}

TEST_MAIN

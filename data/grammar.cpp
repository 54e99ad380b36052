// The grammar's notation read into tables, and the writer that walks them.
#include "data/grammar.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <sstream>

#include "common/error.h"
#include "common/random.h"

namespace {

bool is_name(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

// The one with this name, −1 if there is none.
template <class Named>
int find(const std::vector<Named>& all, const std::string& name) {
    for (size_t i = 0; i < all.size(); i++)
        if (all[i].name == name)
            return static_cast<int>(i);
    return -1;
}

class Reader {
  public:
    Reader(Grammar& grammar, const std::string& source) : g_(grammar) {
        std::vector<std::string> lines(1);  // each with those that continue it
        std::istringstream in(source);
        for (std::string line; std::getline(in, line);)
            if (line[0] == ' ')
                lines.back() += " " + line.erase(0, line.find_first_not_of(' '));
            else
                lines.push_back(line);

        // Rules and variables may be used before they are defined, so headers and bindings are read
        // first.
        for (const auto read :
             {&Reader::read_header, &Reader::read_bindings, &Reader::read_alternatives})
            for (const std::string& line : lines) {
                line_ = line;
                at_ = 0;
                if (!line.empty() && line[0] != '#')
                    (this->*read)();
            }
        for (const Rule& rule : g_.rules)
            if (rule.alternatives.empty())
                throw Error("grammar: no alternatives of rule " + rule.name);
    }

  private:
    Grammar& g_;
    std::string line_;  // what is being read, and where in it
    size_t at_ = 0;
    int current_ = -1;  // the rule whose header was read last
    char form_ = 0;     // its form: l(ist), r(ule) or t(able)

    [[noreturn]] void fail(const std::string& what) const {
        throw Error("grammar: " + what + " in \"" + line_.substr(0, 80) + "\"");
    }
    // The name that starts behind the character at at_.
    std::string read_name() {
        const size_t begin = ++at_;
        while (is_name(line_[at_]))
            at_++;
        return line_.substr(begin, at_ - begin);
    }

    void read_header() {
        if (line_[0] != '@')
            return;
        const std::string form = read_name();
        const std::string name = line_[at_] == ' ' ? read_name() : "";
        std::vector<std::string> columns;
        while (line_.compare(at_, 2, ": ") == 0 || line_.compare(at_, 2, ", ") == 0) {
            at_++;
            columns.push_back(read_name());
        }
        const bool table = form == "table";
        if (name.empty() || at_ < line_.size() || (form != "list" && form != "rule" && !table) ||
            table == columns.empty())
            fail("bad header");
        if (g_.rule(name) >= 0)
            fail("second definition");
        g_.rules.push_back({name, table ? columns : std::vector<std::string>{""}, {}});
    }

    // A slot {name:rule} binds a variable to a rule.
    void read_bindings() {
        while ((at_ = line_.find('{', at_)) != std::string::npos) {
            const std::string name = read_name();
            if (line_[at_] == ':' && find(g_.variables, name) < 0)
                g_.variables.push_back({name, g_.rule(read_name())});
        }
    }

    void read_alternatives() {
        if (line_[0] == '@') {
            current_++;
            form_ = line_[1];
            return;
        }
        if (current_ < 0)
            fail("no header yet");
        if (form_ == 'r') {
            const int weight = std::atoi(line_.c_str());
            at_ = line_.find(' ') + 1;
            if (weight < 1 || at_ == 0)
                fail("no weight");
            const Template text = read_template("");
            g_.rules[current_].alternatives.push_back({static_cast<uint64_t>(weight), {text}});
            return;
        }
        // A list is a table of one column.
        const std::string separator = form_ == 'l' ? "," : "/";
        std::vector<Template> firsts;
        std::vector<Template> columns(1);
        do
            firsts.push_back(read_template(separator + "|", true));
        while (line_[at_++] == separator[0]);
        for (; at_ <= line_.size(); at_++)
            columns.push_back(read_template("|", true));
        if (columns.size() != g_.rules[current_].columns.size())
            fail("wrong number of columns");
        for (const Template& first : firsts) {
            columns[0] = first;
            if (!first.empty())
                g_.rules[current_].alternatives.push_back({1, columns});
        }
    }

    // Up to one of the `stop` characters, which stays. A part of a line may also end with it, and
    // has no blanks around it.
    Template read_template(const std::string& stop, bool part = false) {
        static const std::string kBreak = " ¶ ";
        while (part && line_[at_] == ' ')
            at_++;
        Template t;
        std::string literal;
        const auto flush = [&] {
            if (!literal.empty())
                t.push_back({Symbol::text, literal});
            literal.clear();
        };
        while (at_ < line_.size() && stop.find(line_[at_]) == std::string::npos) {
            const char c = line_[at_];
            if (line_.compare(at_, kBreak.size(), kBreak) == 0) {
                literal += '\n';
                at_ += kBreak.size();
            } else if (c == '{' || c == '(' || c == '[') {
                const size_t n = literal.size();
                const bool article = n >= 2 && literal[n - 1] == ' ' &&
                                     std::tolower(literal[n - 2]) == 'a' &&
                                     (n == 2 || !is_name(literal[n - 3]));
                if (article)
                    literal.pop_back();
                flush();
                t.push_back(c == '{' ? read_slot() : c == '(' ? read_choice() : read_option());
                t.back().article = article;
            } else {
                literal += c;
                at_++;
            }
        }
        if (at_ >= line_.size() && !part && !stop.empty())
            fail("no closing " + stop);
        if (part)
            literal.erase(literal.find_last_not_of(' ') + 1);
        flush();
        return t;
    }
    // A rule without a name, written in place.
    Symbol choice_of(const std::vector<Alternative>& alternatives) {
        at_++;  // the closing bracket
        g_.rules.push_back({"", {""}, alternatives});
        return {Symbol::choose, "", static_cast<int>(g_.rules.size()) - 1};
    }
    Symbol read_choice() {  // (one|two)
        std::vector<Alternative> alternatives;
        do {
            at_++;
            alternatives.push_back({1, {read_template("|)")}});
        } while (line_[at_] == '|');
        return choice_of(alternatives);
    }
    Symbol read_option() {  // [30% text ]
        const int percent = std::atoi(line_.c_str() + at_ + 1);
        const size_t sign = line_.find("% ", at_);
        if (percent < 1 || percent > 99 || sign == std::string::npos)
            fail("an option without its percentage");
        at_ = sign + 2;
        const Template taken = read_template("]");
        return choice_of({{static_cast<uint64_t>(percent), {taken}},
                          {static_cast<uint64_t>(100 - percent), {{}}}});
    }
    Symbol read_slot() {  // {Name}, {name.column}, {name:rule.column!other}
        Symbol s{Symbol::choose};
        std::string name = read_name();
        std::string of;
        std::string column;
        s.capital = std::isupper(static_cast<unsigned char>(name[0]));
        name[0] = static_cast<char>(std::tolower(name[0]));
        s.variable = find(g_.variables, name);
        if (line_[at_] == ':')
            of = read_name();
        if (line_[at_] == '.')
            column = read_name();
        while (line_[at_] == '!')
            s.others.push_back(find(g_.variables, read_name()));
        if (line_[at_++] != '}' || name.empty())
            fail("bad slot");

        if (s.variable >= 0 && of.empty())
            s.kind = column.empty() ? Symbol::again : Symbol::recall;
        s.rule = s.variable >= 0 ? g_.variables[s.variable].rule : g_.rule(name);
        if (s.rule < 0)
            fail("no rule " + (of.empty() ? name : of));
        if (!of.empty() && g_.rule(of) != s.rule)
            fail("bad binding of " + name);
        const std::vector<std::string>& columns = g_.rules[s.rule].columns;
        const auto found = std::find(columns.begin(), columns.end(), column);
        if (!column.empty() && found == columns.end())
            fail("no column " + column);
        if (!column.empty())
            s.column = static_cast<int>(found - columns.begin());
        for (int other : s.others)
            if (other < 0 || g_.variables[other].rule != s.rule)
                fail("the name after ! remembers no row of it");
        return s;
    }
};

class Writer {
  public:
    Writer(const Grammar& grammar, uint64_t seed, uint64_t index)
        : g_(grammar), state_(mix64(mix64(seed) + index)), memory_(grammar.variables.size()) {}

    std::string choose(const Symbol& s) {
        const auto weight = [&](const Alternative& a) {
            for (int other : s.others)
                if (remembered(other).row == &a)
                    return uint64_t{0};
            return a.weight;
        };
        uint64_t total = 0;
        for (const Alternative& a : g_.rules[s.rule].alternatives)
            total += weight(a);
        // splitmix64, scaled by its high bits: off uniform by less than total/2⁶⁴
        auto left = static_cast<uint64_t>(
            static_cast<unsigned __int128>(mix64(state_ += kGolden)) * total >> 64);
        const Alternative* a = g_.rules[s.rule].alternatives.data();
        for (; left >= weight(*a); a++)
            left -= weight(*a);
        const std::string text = write(a->columns[s.column]);
        if (s.variable >= 0)
            memory_[s.variable] = {a, text};
        return text;
    }

  private:
    const Grammar& g_;
    uint64_t state_;
    struct Memory {
        const Alternative* row = nullptr;
        std::string text;
    };
    std::vector<Memory> memory_;

    const Memory& remembered(int variable) const {
        if (!memory_[variable].row)
            throw Error("grammar: " + g_.variables[variable].name + " is not chosen yet");
        return memory_[variable];
    }
    std::string write(const Template& t) {
        std::string out;
        for (const Symbol& s : t) {
            std::string piece = s.kind == Symbol::text    ? s.literal
                                : s.kind == Symbol::again ? remembered(s.variable).text
                                : s.kind == Symbol::recall
                                    ? write(remembered(s.variable).row->columns[s.column])
                                    : choose(s);
            if (piece.empty())
                continue;  // an option not taken
            if (s.article)
                out += std::strchr("aeiouAEIOU", piece[0]) ? "n " : " ";
            if (s.capital)
                piece[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(piece[0])));
            out += piece;
        }
        return out;
    }
};

}  // namespace

Grammar::Grammar(const std::string& source) {
    Reader(*this, source);
}

int Grammar::rule(const std::string& name) const {
    return find(rules, name);
}

std::string Grammar::write(int rule, uint64_t seed, uint64_t index) const {
    return Writer(*this, seed, index).choose({Symbol::choose, "", rule});
}
